from __future__ import annotations

import dataclasses
import json

import pytest

from maxlm.data.documents.document import Document
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.executor import TransientError
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange
from maxlm.data.prepare import partitions as partitions_module
from maxlm.data.prepare.partitions import Partition, ReadSettings, make_partitions, read_batches
from maxlm.errors import InputError
from maxlm.storage.errors import StorageError, classify_error


@pytest.fixture
def small_partitions(monkeypatch):
    monkeypatch.setattr(partitions_module, 'MIN_GROUP_BYTES', 200)


@pytest.fixture
def corpus(tmp_path):
    """Returns the paths of two sources: text files of 10 to 120 bytes, and a JSONL file of 4 kB."""
    (tmp_path / 'a').mkdir()
    for i in range(12):
        (tmp_path / 'a' / f'{i:02}.txt').write_text('x' * (10 + 10 * i))
    lines = [json.dumps({'text': f'line {i} ' * 5}) for i in range(80)]
    (tmp_path / 'b.jsonl').write_text('\n'.join(lines))
    return [tmp_path / 'a', tmp_path / 'b.jsonl']


def names(partitions, *, skip_bad=False, skipped=None):
    reading = ReadSettings(ReadOptions(), skip_bad)
    batches = [
        batch
        for partition in partitions
        for batch in read_batches(partition, reading, [] if skipped is None else skipped)
    ]
    return [document.name for documents, _ in batches for document in documents]


def test_partitions_cover_all_documents_once_with_one_source_each(corpus, small_partitions):
    partitions = make_partitions(find_inputs(corpus), [])
    assert len(partitions) > 10
    assert [partition.number for partition in partitions] == list(range(len(partitions)))
    for partition in partitions:
        assert {file_range.file.source for file_range in partition.file_ranges} == {partition.source}
        assert 0 < partition.size < 600
    found = names(partitions)
    assert len(found) == len(set(found)) == 92
    assert found == names(make_partitions(find_inputs(corpus), []))
    # Control: with the default size there is one partition per source, with the same documents.
    partitions_module.MIN_GROUP_BYTES = 2**21
    usual = make_partitions(find_inputs(corpus), [])
    assert [partition.source for partition in usual] == ['a', 'b.jsonl']
    assert names(usual) == found


def test_validation_partitions_come_last(corpus, small_partitions):
    partitions = make_partitions(find_inputs(corpus[1:]), find_inputs(corpus[:1]))
    is_validation = [partition.is_validation for partition in partitions]
    assert is_validation == sorted(is_validation)
    assert {partition.source for partition in partitions if partition.is_validation} == {'a'}


def test_the_identity_depends_on_all_inputs(corpus):
    partition = make_partitions(find_inputs(corpus), [])[1]
    file_range = partition.file_ranges[0]
    assert partition.identity == make_partitions(find_inputs(corpus), [])[1].identity
    others = [
        dataclasses.replace(partition, number=7),
        dataclasses.replace(partition, is_validation=True),
        dataclasses.replace(partition, file_ranges=(dataclasses.replace(file_range, stop=5),)),
        dataclasses.replace(partition, file_ranges=(dataclasses.replace(file_range, start=5),)),
        dataclasses.replace(partition, file_ranges=(file_range, file_range)),
    ]
    for field, value in {'name': 'n', 'source': 's', 'kind': 'text', 'size': 1, 'version': 'v'}.items():
        file = dataclasses.replace(file_range.file, **{field: value})
        others.append(dataclasses.replace(partition, file_ranges=(dataclasses.replace(file_range, file=file),)))
    assert len({partition.identity, *(other.identity for other in others)}) == len(others) + 1
    # The path is not part of the identity.
    moved = dataclasses.replace(file_range, file=dataclasses.replace(file_range.file, path='/elsewhere'))
    assert dataclasses.replace(partition, file_ranges=(moved,)).identity == partition.identity
    reading = ReadSettings(ReadOptions(), skip_bad=False)
    assert reading.identity != ReadSettings(ReadOptions(), skip_bad=True).identity
    assert reading.identity != ReadSettings(ReadOptions(text_key='body'), skip_bad=False).identity


def test_batches_span_files_and_count_all_bytes(corpus, monkeypatch):
    partition = make_partitions(find_inputs(corpus[:1]), [])[0]
    reading = ReadSettings(ReadOptions(), skip_bad=False)
    for characters, expected in ((10**6, [12]), (200, [6, 3, 2, 1]), (1, [1] * 12)):
        monkeypatch.setattr(partitions_module, 'BATCH_CHARACTERS', characters)
        batches = list(read_batches(partition, reading, []))
        assert [len(documents) for documents, _ in batches] == expected
        assert sum(size for _, size in batches) == partition.size


def failing_partition(tmp_path, monkeypatch, cause):
    """Returns a partition of three files; reading the second file fails with `cause`."""
    for name in ('0.txt', '1.txt', '2.txt'):
        (tmp_path / name).write_text('text')

    def read(file_range, options, on_bad):
        try:
            if file_range.file.name == '1.txt':
                raise classify_error('1.txt', cause)
        except StorageError as error:
            on_bad(file_range.file.name, str(error))
            return
        yield Document(file_range.file.name, 's', 'text')

    monkeypatch.setattr(partitions_module, 'read_documents', read)
    files = find_inputs([tmp_path])
    return Partition(0, tuple(FileRange(file, 0, 0, file.size) for file in files), is_validation=False)


@pytest.mark.parametrize('skip_bad', [False, True])
@pytest.mark.parametrize('cause', [TimeoutError(), ConnectionResetError(), OSError(5, 'Input/output error')])
def test_files_with_transient_errors_are_not_skipped(tmp_path, monkeypatch, cause, skip_bad):
    partition = failing_partition(tmp_path, monkeypatch, cause)
    with pytest.raises(TransientError, match=r'^1\.txt: '):
        names([partition], skip_bad=skip_bad)


def test_a_deleted_file_is_a_bad_record(tmp_path, monkeypatch):
    partition = failing_partition(tmp_path, monkeypatch, FileNotFoundError())
    with pytest.raises(InputError, match='--skip-bad-records'):
        names([partition])
    skipped: list[dict[str, str]] = []
    assert names([partition], skip_bad=True, skipped=skipped) == ['0.txt', '2.txt']
    assert skipped == [{'name': '1.txt', 'reason': '1.txt: No such file or directory'}]


def test_names_of_partitions_contain_the_first_range(corpus, small_partitions):
    partitions = make_partitions(find_inputs(corpus), [])
    assert partitions[0].name.endswith('a/00.txt and 5 more files')
    assert partitions[-1].name.endswith(f'b.jsonl from {partitions[-1].file_ranges[0].start:,}')
