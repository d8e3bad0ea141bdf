import pytest

from maxlm.data.parts.share import ALL, Share, parse_share
from maxlm.errors import InputError
from tests.preparing import run


@pytest.mark.parametrize(('count', 'number'), [(1, 7), (3, 7), (8, 7)])
def test_shares_cover_all_tasks_once(count, number):
    shares = [parse_share(f'{index}/{count}', {}).of(range(number)) for index in range(count)]
    assert sorted(task for share in shares for task in share) == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_share_of_an_array():
    array = {'SLURM_ARRAY_TASK_ID': '5', 'SLURM_ARRAY_TASK_MIN': '3', 'SLURM_ARRAY_TASK_MAX': '7'}
    assert parse_share('', array) == Share(2, 5)
    assert parse_share('0/2', array) == Share(0, 2)
    assert parse_share('', {'SLURM_JOB_ID': '9'}) == ALL


@pytest.mark.parametrize('text', ['2/2', '-1/2', '1', '0/0', 'a/b', '1/2/3', '٣/٤'])
def test_bad_shares(text):
    with pytest.raises(InputError, match=f'--task={text}: must be I/N with I from 0 to N-1, for example 0/8'):
        parse_share(text, {})


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--task', '0/2'], '--task=0/2 requires --stage=scan or --stage=shards'),
        (['--task', '0/2', '--stage', 'plan'], '--task=0/2 requires --stage=scan or --stage=shards'),
        (['--task', '2/2', '--stage', 'scan'], '--task=2/2: must be I/N'),
        (['--stage', 'scan', '--skip-failed'], '--skip-failed does not work with --stage=scan'),
        (['--stage', 'scan', '--stream'], '--stream does not work with --stage=scan'),
        (['--executor', 'ray', '--stream'], '--stream does not work with --executor=ray and a bucket'),
    ],
)
def test_options_that_do_not_work_together(tmp_path, capsys, words, message):
    (tmp_path / 'x.txt').write_text('text')
    assert run('--input', tmp_path / 'x.txt', '--output', 'gs://bucket/web', *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: {message}')
    assert error.count('\n') == 1
