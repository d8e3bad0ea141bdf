import pytest

from maxlm.data.formats.input_file import InputFile
from maxlm.data.parts.job import JOB_NAME, check_job, make_job
from maxlm.data.parts.part_store import SharedDirectory
from maxlm.errors import InputError

FILES = [InputFile(f'/texts/{name}', name, 'texts', 'text', 10, '1') for name in 'abc']
OPTIONS = {'inputs': 'sum', 'block': 16, 'roles': ('user',)}


@pytest.fixture
def store(tmp_path):
    check_job(SharedDirectory(tmp_path), make_job(OPTIONS, FILES), 'data/web')
    return SharedDirectory(tmp_path)


@pytest.mark.parametrize(
    ('options', 'files', 'message'),
    [
        (OPTIONS, FILES[:1], '/texts/b, which is missing, and 1 more files'),
        (OPTIONS, [*FILES, InputFile('/texts/d', 'd', 'texts', 'text', 1, '1')], '/texts/d, which is new'),
        (OPTIONS, [*FILES[:2], InputFile('/texts/c', 'c', 'texts', 'text', 10, '2')], '/texts/c, which has changed'),
        ({**OPTIONS, 'inputs': 'other'}, FILES, 'the same files in another order or under other names'),
        ({**OPTIONS, 'block': 32}, FILES, 'block 32 instead of 16'),
        ({'inputs': 'sum', 'block': 16}, FILES, r"roles None instead of \['user'\]"),
    ],
)
def test_changes_are_named(store, options, files, message):
    with pytest.raises(InputError, match=f'data/web contains an unfinished .*: now {message}; restore them'):
        check_job(store, make_job(options, files), 'data/web')


def test_the_same_job_continues_and_a_damaged_one_is_named(store):
    check_job(store, make_job(OPTIONS, FILES), 'data/web')
    (store.directory / JOB_NAME).write_text('[1')
    with pytest.raises(InputError, match=r'data/web/\.prepare/job\.json is damaged .*; delete data/web/\.prepare'):
        check_job(store, make_job(OPTIONS, FILES), 'data/web')
