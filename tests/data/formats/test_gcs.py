"""Tests inputs in a local Google Cloud Storage bucket: discovery, ranges, reading, and errors for missing files."""

import gzip
import json

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import read_documents, split_file
from maxlm.errors import InputError

pytestmark = pytest.mark.network_emulator

LINES = [json.dumps({'text': f'line {number} ' * 5}) for number in range(40)]


@pytest.fixture
def bucket(gcs):
    gcs.put('corpus', 'web/a.jsonl', '\n'.join(LINES).encode())
    gcs.put('corpus', 'web/deep/b.jsonl.gz', gzip.compress('\n'.join(LINES[:3]).encode()))
    gcs.put('corpus', 'web/deep/c.txt', b'a text')
    return gcs


def texts(paths, target=10**9):
    file_ranges = [file_range for file in find_inputs(paths) for file_range in split_file(file, target)]
    documents = [document for file_range in file_ranges for document in read_documents(file_range, ReadOptions())]
    return [document.text for document in documents], len(file_ranges)


@pytest.mark.parametrize(
    ('path', 'count'), [('gs://corpus/web', 44), ('gs://corpus/web/**/*.txt', 1), ('gs://corpus/web/a.jsonl', 40)]
)
def test_trees_globs_and_files(bucket, path, count):
    expected, _ = texts([path])
    assert len(expected) == count
    in_ranges, num_ranges = texts([path], target=300)
    assert in_ranges == expected
    assert num_ranges > 1 or count == 1


def test_the_version_changes_with_the_content(bucket):
    (before,) = find_inputs(['gs://corpus/web/a.jsonl'])
    assert find_inputs(['gs://corpus/web/a.jsonl']) == [before]
    bucket.put('corpus', 'web/a.jsonl', '\n'.join(reversed(LINES)).encode())
    (after,) = find_inputs(['gs://corpus/web/a.jsonl'])
    assert after.size == before.size
    assert after.version != before.version


def test_missing_files_are_named(bucket):
    with pytest.raises(InputError, match=r'^gs://corpus/books: '):
        find_inputs(['gs://corpus/books'])
    files = find_inputs(['gs://corpus/web'])
    bucket.vanish()
    reasons = []
    for file in files:
        for file_range in split_file(file, 10**9):
            assert list(read_documents(file_range, ReadOptions(), lambda name, reason: reasons.append(reason))) == []
    assert len(reasons) == len(files)
    assert all(reason.startswith('gs://corpus/web/') and '\n' not in reason for reason in reasons), reasons
