"""Tests data sets of Hugging Face: local directories, and a fake Hub, because tests have no network."""

import gzip
import json
import os
import re
import subprocess
import sys
import types

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import hf_datasets
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError
from maxlm.installation import pip_install

TEXTS = [f'{i} ü\n' * (i % 7) if i % 5 else None for i in range(100)]


@pytest.fixture(scope='module')
def datasets():
    with pytest.MonkeyPatch.context() as patch:
        # The package reads this variable once, at import.
        patch.setenv('HF_HUB_OFFLINE', '1')
        datasets = pytest.importorskip('datasets', reason='the extra hub')
        patch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
        bars = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        yield datasets
        if not bars:
            datasets.enable_progress_bars()


@pytest.fixture
def table(datasets):
    return datasets.Dataset.from_dict({'id': list(range(100)), 'text': TEXTS})


@pytest.fixture(params=['saved', 'saved splits', 'parquet', 'jsonl'])
def directory(request, datasets, table, tmp_path):
    """Returns a directory with a data set in one of the supported layouts; split `train` has the 100 rows."""
    path = tmp_path / 'set'
    if request.param == 'saved':
        table.save_to_disk(path)
    elif request.param == 'saved splits':
        datasets.DatasetDict({'train': table, 'test': table.select(range(3))}).save_to_disk(path)
    else:
        path.mkdir()
        write = 'to_parquet' if request.param == 'parquet' else 'to_json'
        suffix = request.param
        for number in range(4):
            shard = table.shard(4, number, contiguous=True)
            getattr(shard, write)(path / f'train-{number:05d}-of-00004.{suffix}')
        getattr(table.select(range(3)), write)(path / f'test-00000-of-00001.{suffix}')
    return path


def test_ranges_give_all_documents(directory, check_ranges, read):
    check_ranges(f'hf:{directory}', [500, 1000, 2**30], metadata_keys=('id',))
    documents = read(f'hf:{directory}', metadata_keys=('id',))
    assert [(d.text, d.metadata) for d in documents] == [(text, {'id': i}) for i, text in enumerate(TEXTS) if text]
    assert {d.source for d in documents} == {'set'}
    assert all(d.name.startswith('set#train:') for d in documents)
    assert len({d.name for d in documents}) == len(documents)


def test_names_contain_rows_or_shards(table, tmp_path, read):
    table.save_to_disk(tmp_path / 'saved')
    assert read(f'hf:{tmp_path}/saved', target_bytes=100)[5].name == 'saved#train:8'
    (tmp_path / 'files').mkdir()
    for number in range(2):
        table.select(range(50 * number, 50 * number + 50)).to_parquet(tmp_path / 'files' / f'train-{number}.parquet')
    rows = [row for row, text in enumerate(TEXTS) if text]
    assert [d.name for d in read(f'hf:{tmp_path}/files')] == [f'files#train:{row // 50}:{row % 50}' for row in rows]


def test_splits(directory, request, read):
    if 'saved]' in request.node.name:
        # `save_to_disk` of one split does not keep its name.
        with pytest.raises(InputError, match="one unnamed split; remove '#test'"):
            find_inputs([f'hf:{directory}#test'])
        return
    assert [d.text for d in read(f'hf:{directory}#test')] == [text for text in TEXTS[:3] if text]
    with pytest.raises(InputError, match=r"#nope: .*split:? '?nope'?.*train.*test|#nope: .*test.*train"):
        find_inputs([f'hf:{directory}#nope'])


def test_the_version_changes_with_the_files(table, tmp_path):
    table.save_to_disk(tmp_path / 'set')
    before = find_inputs([f'hf:{tmp_path}/set'])
    assert find_inputs([f'hf:{tmp_path}/set']) == before
    assert before[0].size > 1000
    table.select(range(50)).save_to_disk(tmp_path / 'set')
    assert find_inputs([f'hf:{tmp_path}/set'])[0].version != before[0].version


def test_a_missing_column_is_named(directory, bad_records):
    ((name, reason),) = bad_records(f'hf:{directory}', text_key='content')
    assert name == 'set#train'
    assert "no column 'content'; it has id, text; set --text-field to the column" in reason
    ((_, reason), *_) = bad_records(f'hf:{directory}', text_key='id')
    # Parquet reports the type of the column, other formats that of a row.
    assert "the column 'id' contains int64, not text" in reason or re.search(
        r': row [0:]+ contains int, not text', reason
    )


def test_a_damaged_directory_is_named(tmp_path, table, bad_records):
    for number in range(3):
        (tmp_path / 'set').mkdir(exist_ok=True)
        table.to_parquet(tmp_path / 'set' / f'train-{number}.parquet')
    good = find_inputs([f'hf:{tmp_path}/set'])
    assert len(split_file(good[0], 100)) == 3
    content = (tmp_path / 'set' / 'train-1.parquet').read_bytes()
    (tmp_path / 'set' / 'train-1.parquet').write_bytes(content[:4] + b'\xff' * 1200 + content[1204:])
    ((name, reason),) = bad_records(f'hf:{tmp_path}/set')
    assert name == 'set#train:1:0'
    assert reason.startswith(f'{tmp_path}/set/train-1.parquet: the row group of rows 0 to ')


def test_lines_are_limited_after_other_uses_of_the_package(tmp_path):
    """Tests the limit after other code, such as lm-eval, has used the package.

    The test starts a process, because the package opens files through global state.
    """
    (tmp_path / 'set').mkdir()
    (tmp_path / 'set/train.jsonl').write_text(json.dumps({'text': 'x' * 3000}))
    program = f"""
import datasets
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import hf_datasets
from maxlm.errors import InputError
datasets.load_dataset_builder({str(tmp_path / 'set')!r})
try:
    hf_datasets.find('hf:{tmp_path}/set', 2000)
except InputError as error:
    print(error)
"""
    environment = {**os.environ, 'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'cache')}
    process = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, env=environment)
    assert 'a line is longer than ' in process.stdout, process.stdout + process.stderr


@pytest.mark.parametrize('suffix', ['jsonl', 'jsonl.gz', 'json'])
def test_lines_longer_than_a_record_are_named(tmp_path, datasets, bad_records, read, suffix):
    lines = [json.dumps({'text': 'fine'}), json.dumps({'text': 'x' * 3000})]
    write = gzip.compress if suffix.endswith('gz') else bytes
    (tmp_path / 'set').mkdir()
    (tmp_path / f'set/train.{suffix}').write_bytes(write('\n'.join(lines).encode()))
    # Opens the files again, like a new worker.
    hf_datasets._open.cache_clear()
    assert len(read(f'hf:{tmp_path}/set', max_record_bytes=4000)) == 2
    ((name, reason),) = bad_records(f'hf:{tmp_path}/set', max_record_bytes=2000)
    assert name == 'set#train'
    assert f'train.{suffix}' in reason
    assert 'a line is longer than ' in reason
    assert 'the limit for a record; raise --max-record-mib' in reason
    hf_datasets._open.cache_clear()
    with pytest.raises(InputError, match='a line is longer than'):
        find_inputs([f'hf:{tmp_path}/set'], max_record_bytes=2000)


@pytest.mark.parametrize('given', ['hf:', 'hf:/no/such/directory', 'hf:a/b/c', 'hf:a b', 'hf:a@'])
def test_invalid_names_are_rejected(given):
    with pytest.raises(InputError, match=r'not a directory or the name of a data set; use hf:NAME'):
        find_inputs([given])


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    hf_datasets._open.cache_clear()
    with pytest.raises(InputError, match=re.escape(f'hf:some/name needs datasets: {pip_install("hub")}')):
        find_inputs(['hf:some/name'])


@pytest.fixture
def fake_hub(datasets, table, monkeypatch):
    """Replaces the Hub with one data set of three shards; yields the list of requests."""
    import huggingface_hub

    requests = []

    def load_dataset(name, config=None, **options):
        requests.append((name, config, options))
        if name != 'org/corpus':
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return table.to_iterable_dataset(num_shards=3)

    def dataset_info(self, name, *, revision=None, files_metadata=False):
        requests.append((name, revision, files_metadata))
        if name != 'org/corpus':
            raise ConnectionError('cannot be reached')
        files = [types.SimpleNamespace(size=size) for size in (500, None, 700)]
        return types.SimpleNamespace(sha=f'commit-of-{revision}', siblings=files)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', dataset_info)
    hf_datasets._open.cache_clear()
    yield requests
    hf_datasets._open.cache_clear()


def test_the_first_files_of_a_name(fake_hub):
    """`--max-files 2` reads two of the three shards, and is another version of the data."""
    every, part, more = (find_inputs(['hf:org/corpus'], max_files=limit)[0] for limit in (0, 2, 3))
    assert (part.size, part.version) == (800, 'commit-of-None, 2 of 3 files')
    assert more == every
    ranges = split_file(part, 400)
    assert [(file_range.start, file_range.stop) for file_range in ranges] == [(0, 1), (1, 2)]
    texts = [document.text for one in ranges for document in read_documents(one, ReadOptions())]
    # The shards have 34, 33 and 33 rows.
    assert texts == [text for text in TEXTS[:67] if text]


def test_a_name_is_streamed_at_one_commit(fake_hub, read):
    (file,) = find_inputs(['hf:org/corpus:de@v2#test'])
    assert fake_hub == [
        ('org/corpus', 'v2', False),
        ('org/corpus', 'de', {'split': 'test', 'revision': 'commit-of-v2', 'streaming': True}),
        ('org/corpus', 'commit-of-v2', True),
    ]
    assert (file.path, file.name, file.source, file.kind, file.size, file.version) == (
        'hf:org/corpus:de@commit-of-v2#test',
        'org/corpus:de#test',
        'corpus',
        'hub',
        1200,
        'commit-of-v2',
    )
    assert [(file_range.start, file_range.stop) for file_range in split_file(file, 400)] == [(0, 1), (1, 2), (2, 3)]
    documents = read('hf:org/corpus', target_bytes=400)
    assert [d.text for d in documents] == [text for text in TEXTS if text]
    assert documents[0].name == 'org/corpus#train:0:1'
    assert fake_hub[-2] == ('org/corpus', None, {'split': 'train', 'revision': 'commit-of-None', 'streaming': True})
    assert find_inputs(['hf:org/corpus'])[0].name == 'org/corpus#train'


def test_a_name_is_pinned_to_its_commit(fake_hub, tmp_path):
    assert hf_datasets.pin('hf:org/corpus:all#test') == 'hf:org/corpus:all@commit-of-None#test'
    assert hf_datasets.pin('hf:org/corpus@v1') == 'hf:org/corpus@commit-of-v1#train'
    assert hf_datasets.pin(f'hf:{tmp_path}#test') == f'hf:{tmp_path}#test'


def test_a_missing_data_set_is_named(fake_hub, monkeypatch):
    with pytest.raises(InputError, match=r'^hf:org/none: no answer \(cannot be reached'):
        find_inputs(['hf:org/none'])
    monkeypatch.setattr(hf_datasets, '_commit', lambda given, spec: 'commit')
    with pytest.raises(InputError, match=r"^hf:org/none@commit#train: .*org/none' doesn't exist on the Hub"):
        find_inputs(['hf:org/none'])
