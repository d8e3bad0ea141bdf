import random
import threading

import pytest

from maxlm.data.dataset.remote_manifest import with_checksums
from maxlm.errors import InputError
from maxlm.storage import download, download_tree
from maxlm.storage.download import RemoteFile
from maxlm.storage.download_tree import fetch_tree, list_tree

NAMES = ['a.jsonl', 'books/b.txt', 'books/deep/c.txt', 'books/deep/d.jsonl', 'code/e.py', 'code/.hidden']
CONTENTS = {name: random.Random(name).randbytes(500 + 100 * len(name)) for name in NAMES}


@pytest.fixture
def gcs(gcs):
    for name, content in CONTENTS.items():
        gcs.put('bucket', f'corpus/{name}', content)
    # Web consoles create such an object for a new folder.
    gcs.put('bucket', 'corpus/books/', b'')
    gcs.put('bucket', 'corpus2/other.txt', b'x')
    return gcs


@pytest.fixture
def s3(s3):
    for name, content in CONTENTS.items():
        s3.put_object(Bucket='bucket', Key=f'corpus/{name}', Body=content)
    s3.put_object(Bucket='bucket', Key='corpus2/other.txt', Body=b'x')
    return s3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', 300)
    monkeypatch.setattr(download_tree, 'POLL_SECONDS', 0.001)


def listed(url, tmp_path, **options):
    files = list_tree(url, tmp_path, **options)
    return [str(file.path.relative_to(tmp_path)) for file in files]


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob('*')) if path.is_file()
    }


CASES = [
    ('corpus', sorted(NAMES)),
    ('corpus/', sorted(NAMES)),
    ('corpus/books', ['b.txt', 'deep/c.txt', 'deep/d.jsonl']),
    ('corpus/books/b.txt', ['b.txt']),
    ('corpus/*.jsonl', ['a.jsonl']),
    ('corpus/**/*.jsonl', ['a.jsonl', 'books/deep/d.jsonl']),
    ('corpus/bo*', ['books/b.txt', 'books/deep/c.txt', 'books/deep/d.jsonl']),
    ('corpus/*/deep/[cx].txt', ['books/deep/c.txt']),
]


@pytest.mark.parametrize(('path', 'found'), CASES)
def test_files_folders_and_globs(gcs, tmp_path, path, found):
    assert listed(f'gs://bucket/{path}', tmp_path) == found


def test_s3(s3, tmp_path):
    for path, found in CASES:
        assert listed(f's3://bucket/{path}', tmp_path) == found
    fetch_tree(list_tree('s3://bucket/corpus', tmp_path), threads=3, on_alarm=pytest.fail)
    assert contents(tmp_path) == CONTENTS
    with pytest.raises(InputError, match='s3://bucket/nothing: No such file'):
        list_tree('s3://bucket/nothing', tmp_path)


@pytest.mark.parametrize('page_size', [1, 2, 1000])
def test_paginated_listings(gcs, tmp_path, page_size):
    gcs.page_size = page_size
    assert listed('gs://bucket/corpus', tmp_path) == sorted(NAMES)
    lists = [request for request in gcs.asked('list') if request.name == 'corpus/']
    assert len(lists) >= len(NAMES) // page_size


def test_include_and_max_files(gcs, tmp_path):
    assert listed('gs://bucket/corpus', tmp_path, include='*.jsonl') == ['a.jsonl', 'books/deep/d.jsonl']
    assert listed('gs://bucket/corpus', tmp_path, include='books/*') == [
        'books/b.txt',
        'books/deep/c.txt',
        'books/deep/d.jsonl',
    ]
    assert listed('gs://bucket/corpus', tmp_path, max_files=2) == sorted(NAMES)[:2]
    assert listed('gs://bucket/corpus', tmp_path, include='*.txt', max_files=1) == ['books/b.txt']
    with pytest.raises(InputError, match=r'gs://bucket/corpus: no files that match \*.zip found'):
        list_tree('gs://bucket/corpus', tmp_path, include='*.zip')


@pytest.mark.parametrize(
    ('url', 'reason'),
    [
        ('gs://bucket/nothing', 'gs://bucket/nothing: No such file or directory'),
        ('gs://bucket/corpus/*.zip', r'gs://bucket/corpus/\*.zip: no files found'),
        ('gs://nobody/corpus', 'gs://nobody/corpus: bucket nobody does not exist'),
    ],
)
def test_no_files_found(gcs, tmp_path, url, reason):
    with pytest.raises(InputError, match=f'^{reason}$'):
        list_tree(url, tmp_path)


def test_denied_listing(gcs, tmp_path):
    gcs.fault(403, requests='get')
    gcs.fault(403, requests='list')
    with pytest.raises(InputError, match='gs://bucket/corpus: access denied'):
        list_tree('gs://bucket/corpus', tmp_path)


@pytest.mark.parametrize('name', ['../out', 'a/../../out', 'a//b', './x'])
def test_names_outside_the_directory_are_refused(gcs, tmp_path, name):
    gcs.put('bucket', f'evil/{name}', b'x')
    with pytest.raises(InputError, match='is not a valid local path'):
        list_tree('gs://bucket/evil', tmp_path)


def test_only_missing_files_are_downloaded(gcs, tmp_path):
    files = list_tree('gs://bucket/corpus', tmp_path)
    fetched, added = [], []
    fetch_tree(files, threads=4, on_alarm=pytest.fail, on_bytes=added.append, on_file=lambda: fetched.append(1))
    assert contents(tmp_path) == CONTENTS
    assert len(fetched) == len(NAMES)
    assert sum(added) == sum(map(len, CONTENTS.values()))
    gcs.requests.clear()
    fetch_tree(files, threads=4, on_alarm=pytest.fail)
    assert gcs.requests == []
    (tmp_path / 'code' / 'e.py').unlink()
    fetch_tree(files, threads=4, on_alarm=pytest.fail)
    assert {request.name for request in gcs.requests if request.kind != 'list'} == {'corpus/code/e.py'}


def test_files_are_fetched_in_parallel(gcs, tmp_path):
    """The first file is not sent before the second is requested."""
    held = gcs.fault('hold', match='corpus/a.jsonl', times=1)

    def release():
        assert held.reached.wait(60)
        held.released.set()

    thread = threading.Thread(target=release)
    thread.start()
    fetch_tree(list_tree('gs://bucket/corpus', tmp_path), threads=2, on_alarm=pytest.fail)
    thread.join()
    assert contents(tmp_path) == CONTENTS


def test_outage_of_a_bucket_is_retried(gcs, tmp_path):
    files = list_tree('gs://bucket/corpus', tmp_path)
    gcs.vanish()
    alarms, waits = [], []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            gcs.appear()

    fetch_tree(files, threads=1, on_alarm=alarms.append, wait=wait)
    assert contents(tmp_path) == CONTENTS
    assert waits == [1, 2, 4]
    assert [alarm.partition(': ')[2] for alarm in alarms] == [
        'no answer (Connection refused); failure, retrying in 1 s',
        'no answer (Connection refused); failure 2 in a row, retrying in 2 s',
        'the bucket responds again',
    ]


def test_first_permanent_error_stops_the_download(gcs, tmp_path):
    files = list_tree('gs://bucket/corpus', tmp_path)
    gcs.fault(403, match='*/c.txt')
    gcs.fault(403, match='*/c.txt', requests='get')
    gcs.fault(403, requests='list')
    with pytest.raises(InputError, match=r'gs://bucket/corpus/books/deep/c.txt: access denied'):
        fetch_tree(files, threads=1, on_alarm=pytest.fail)
    assert sorted(contents(tmp_path)) == ['a.jsonl', 'books/b.txt']
    gcs.faults.clear()
    fetch_tree(files, threads=1, on_alarm=pytest.fail)
    assert contents(tmp_path) == CONTENTS


def test_dataset_json_of_another_program_is_an_ordinary_file(gcs, tmp_path):
    gcs.put('bucket', 'corpus/books/dataset.json', b'{"name": "books"}')
    files = with_checksums(list_tree('gs://bucket/corpus', tmp_path))
    assert not any(file.sha256 for file in files)
    fetch_tree(files, threads=2, on_alarm=pytest.fail)
    assert contents(tmp_path) == {**CONTENTS, 'books/dataset.json': b'{"name": "books"}'}


def test_local_directories(tmp_path):
    source = tmp_path / 'source'
    for name, content in CONTENTS.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    for number, url in enumerate([str(source), f'file://{source}']):
        target = tmp_path / str(number)
        files = list_tree(url, target)
        assert all(isinstance(file, RemoteFile) for file in files)
        fetch_tree(files, threads=2, on_alarm=pytest.fail)
        assert contents(target) == CONTENTS
