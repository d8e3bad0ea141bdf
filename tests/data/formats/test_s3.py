"""Tests inputs in a local S3 bucket."""

import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError
from maxlm.storage import object_store
from tests.buckets import s3 as s3_buckets

pytestmark = pytest.mark.network_emulator

TEXTS = [f'{i} ü' * (i % 7) for i in range(200)]


@pytest.fixture
def bucket(monkeypatch):
    """Yields the file system of an S3 server with a bucket that contains all formats."""
    with s3_buckets.running(monkeypatch):
        filesystem = fsspec.filesystem('s3', skip_instance_cache=True)
        filesystem.mkdir('corpus')
        jsonl = '\n'.join(json.dumps({'text': text}) for text in TEXTS).encode()
        filesystem.pipe_file('corpus/web/a.jsonl', jsonl)
        filesystem.pipe_file('corpus/web/b.jsonl.gz', gzip.compress(jsonl))
        filesystem.pipe_file('corpus/web/deep/er/c.txt', b'plain')
        filesystem.pipe_file('corpus/web/.hidden/d.txt', b'hidden')
        filesystem.pipe_file('corpus/web/empty/', b'')
        with filesystem.open('corpus/web/e.parquet', 'wb') as file:
            pq.write_table(pa.table({'text': TEXTS}), file, row_group_size=50)
        with filesystem.open('corpus/ids/f.npz', 'wb') as file:
            np.savez(file, np.arange(100), np.arange(50))
        yield filesystem


def read(paths, target):
    file_ranges = [file_range for file in find_inputs(paths) for file_range in split_file(file, target)]
    return [(d.name, d.text) for file_range in file_ranges for d in read_documents(file_range, ReadOptions())]


def test_a_bucket_is_read_like_a_directory(bucket, tmp_path):
    files = find_inputs(['s3://corpus/web'])
    assert [(file.path, file.name, file.kind) for file in files] == [
        ('s3://corpus/web/a.jsonl', 'a.jsonl', 'jsonl'),
        ('s3://corpus/web/b.jsonl.gz', 'b.jsonl.gz', 'jsonl'),
        ('s3://corpus/web/deep/er/c.txt', 'deep/er/c.txt', 'text'),
        ('s3://corpus/web/e.parquet', 'e.parquet', 'parquet'),
    ]
    assert {file.source for file in files} == {'web'}
    bucket.get('corpus/web/', str(tmp_path / 'web'), recursive=True)
    expected = read([tmp_path / 'web'], 2**30)
    assert len(expected) > 500
    assert read(['s3://corpus/web/'], 1000) == expected
    assert read(['s3://corpus/web/**/*.txt', 's3://corpus/web/*.parquet'], 1) == [
        entry for suffix in ('.txt', '.parquet:') for entry in expected if suffix in entry[0]
    ]
    (archive,) = find_inputs(['s3://corpus/ids/*.npz'])
    assert len(list(read_documents(split_file(archive, 100)[1], ReadOptions()))) == 1


def test_the_version_changes_with_the_object(bucket):
    before = find_inputs(['s3://corpus/web'])
    assert find_inputs(['s3://corpus/web']) == before
    bucket.pipe_file('corpus/web/deep/er/c.txt', b'PLAIN')
    after = find_inputs(['s3://corpus/web'])
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False, True]


def test_missing_and_deleted_objects_are_named(bucket):
    for path in ('s3://nobody/x', 's3://corpus/nothing', 's3://corpus/web/nothing.jsonl'):
        with pytest.raises(InputError, match=f'^{path}: No such file or directory; '):
            find_inputs([path])
    with pytest.raises(InputError, match=r'^s3://nobody: The specified bucket does not exist|No such file'):
        find_inputs(['s3://nobody/*.txt'])
    files = find_inputs(['s3://corpus/web'])
    file_ranges = [file_range for file in files for file_range in split_file(file, 1000)]
    bucket.rm('corpus/web', recursive=True)
    bucket.invalidate_cache()
    bad = []
    for file_range in file_ranges:
        assert list(read_documents(file_range, ReadOptions(), lambda *args: bad.append(args))) == []
    assert {name for name, _ in bad} == {file.name for file in files}
    assert all(reason.startswith('s3://corpus/web/') and '\n' not in reason for _, reason in bad), bad
    assert all('No such file' in reason or 'damaged' in reason for _, reason in bad), bad


def test_access_errors_contain_no_secrets(bucket, monkeypatch):
    def deny_access(path):
        raise PermissionError('Access Denied for secret_access_key=HUSHHUSH')

    monkeypatch.setattr(object_store.open_filesystem('s3://corpus')[0], 'info', deny_access)
    with pytest.raises(InputError, match=r'^s3://corpus/web: access denied \(Access Denied') as info:
        find_inputs(['s3://corpus/web'])
    assert 'HUSHHUSH' not in str(info.value)


def test_a_key_in_a_url_is_not_shown(bucket):
    with pytest.raises(InputError, match=r'^s3://corpus/web: ') as info:
        find_inputs(['s3://user:HUSHHUSH@corpus/web'])
    assert 'HUSHHUSH' not in str(info.value)


def test_an_unreachable_server_is_named(bucket, monkeypatch):
    monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:1')
    object_store._filesystem.cache_clear()
    with pytest.raises(InputError, match=r'^s3://corpus/web: no answer \(Could not connect'):
        find_inputs(['s3://corpus/web'])
