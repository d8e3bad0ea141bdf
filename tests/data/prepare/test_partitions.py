from __future__ import annotations

import dataclasses
import json

import pytest

from maxlm.data.documents.document import Document
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.executor import TransientError
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange
from maxlm.data.prepare import partitions as groups_module
from maxlm.data.prepare.partitions import Partition, ReadSettings, make_partitions, read_batches
from maxlm.errors import InputError
from maxlm.storage.errors import StorageError, classify_error


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(groups_module, 'MIN_GROUP_BYTES', 200)


@pytest.fixture
def corpus(tmp_path):
    """Two sources: text files of 10 … 120 bytes, and a JSONL file of 4 kB."""
    (tmp_path / 'a').mkdir()
    for i in range(12):
        (tmp_path / 'a' / f'{i:02}.txt').write_text('x' * (10 + 10 * i))
    lines = [json.dumps({'text': f'line {i} ' * 5}) for i in range(80)]
    (tmp_path / 'b.jsonl').write_text('\n'.join(lines))
    return [tmp_path / 'a', tmp_path / 'b.jsonl']


def names(partitions, *, skip_bad=False, left_out=None):
    reading = ReadSettings(ReadOptions(), skip_bad)
    batches = [
        batch
        for partition in partitions
        for batch in read_batches(partition, reading, [] if left_out is None else left_out)
    ]
    return [document.name for documents, _ in batches for document in documents]


def test_groups_hold_everything_once_and_one_source_each(corpus, small):
    partitions = make_partitions(find_inputs(corpus), [])
    assert len(partitions) > 10
    assert [partition.number for partition in partitions] == list(range(len(partitions)))
    for partition in partitions:
        assert {piece.file.source for piece in partition.file_ranges} == {partition.source}
        assert 0 < partition.size < 600
    found = names(partitions)
    assert len(found) == len(set(found)) == 92
    assert found == names(make_partitions(find_inputs(corpus), []))
    # Control: with the usual size there is one group per source, and the same documents.
    groups_module.MIN_GROUP_BYTES = 2**21
    usual = make_partitions(find_inputs(corpus), [])
    assert [partition.source for partition in usual] == ['a', 'b.jsonl']
    assert names(usual) == found


def test_what_is_held_out_comes_last(corpus, small):
    partitions = make_partitions(find_inputs(corpus[1:]), find_inputs(corpus[:1]))
    held_out = [partition.is_validation for partition in partitions]
    assert held_out == sorted(held_out)
    assert {partition.source for partition in partitions if partition.is_validation} == {'a'}


def test_the_identity_is_of_all_that_is_read(corpus):
    partition = make_partitions(find_inputs(corpus), [])[1]
    piece = partition.file_ranges[0]
    assert partition.identity == make_partitions(find_inputs(corpus), [])[1].identity
    others = [
        dataclasses.replace(partition, number=7),
        dataclasses.replace(partition, is_validation=True),
        dataclasses.replace(partition, file_ranges=(dataclasses.replace(piece, stop=5),)),
        dataclasses.replace(partition, file_ranges=(dataclasses.replace(piece, start=5),)),
        dataclasses.replace(partition, file_ranges=(piece, piece)),
    ]
    for field, value in {'name': 'n', 'source': 's', 'kind': 'text', 'size': 1, 'version': 'v'}.items():
        file = dataclasses.replace(piece.file, **{field: value})
        others.append(dataclasses.replace(partition, file_ranges=(dataclasses.replace(piece, file=file),)))
    assert len({partition.identity, *(other.identity for other in others)}) == len(others) + 1
    # Where it lies does not count.
    moved = dataclasses.replace(piece, file=dataclasses.replace(piece.file, path='/elsewhere'))
    assert dataclasses.replace(partition, file_ranges=(moved,)).identity == partition.identity
    reading = ReadSettings(ReadOptions(), skip_bad=False)
    assert reading.identity != ReadSettings(ReadOptions(), skip_bad=True).identity
    assert reading.identity != ReadSettings(ReadOptions(text_key='body'), skip_bad=False).identity


def test_batches_reach_over_files_and_account_for_all_bytes(corpus, monkeypatch):
    partition = make_partitions(find_inputs(corpus[:1]), [])[0]
    reading = ReadSettings(ReadOptions(), skip_bad=False)
    for characters, expected in ((10**6, [12]), (200, [6, 3, 2, 1]), (1, [1] * 12)):
        monkeypatch.setattr(groups_module, 'BATCH_CHARACTERS', characters)
        batches = list(read_batches(partition, reading, []))
        assert [len(documents) for documents, _ in batches] == expected
        assert sum(size for _, size in batches) == partition.size


def failing_group(tmp_path, monkeypatch, cause):
    """A group whose second file cannot be read for `cause`."""
    for name in ('0.txt', '1.txt', '2.txt'):
        (tmp_path / name).write_text('text')

    def read(piece, options, on_bad):
        try:
            if piece.file.name == '1.txt':
                raise classify_error('1.txt', cause)
        except StorageError as error:
            on_bad(piece.file.name, str(error))
            return
        yield Document(piece.file.name, 's', 'text')

    monkeypatch.setattr(groups_module, 'read_documents', read)
    files = find_inputs([tmp_path])
    return Partition(0, tuple(FileRange(file, 0, 0, file.size) for file in files), is_validation=False)


@pytest.mark.parametrize('skip_bad', [False, True])
@pytest.mark.parametrize('cause', [TimeoutError(), ConnectionResetError(), OSError(5, 'Input/output error')])
def test_a_storage_that_may_answer_later_is_not_left_out(tmp_path, monkeypatch, cause, skip_bad):
    partition = failing_group(tmp_path, monkeypatch, cause)
    with pytest.raises(TransientError, match=r'^1\.txt: '):
        names([partition], skip_bad=skip_bad)


def test_a_file_that_is_gone_is_bad(tmp_path, monkeypatch):
    partition = failing_group(tmp_path, monkeypatch, FileNotFoundError())
    with pytest.raises(InputError, match='--skip-bad-records'):
        names([partition])
    left_out: list[dict[str, str]] = []
    assert names([partition], skip_bad=True, left_out=left_out) == ['0.txt', '2.txt']
    assert left_out == [{'name': '1.txt', 'reason': '1.txt: No such file or directory'}]


def test_messages_say_where_a_group_begins(corpus, small):
    partitions = make_partitions(find_inputs(corpus), [])
    assert partitions[0].name.endswith('a/00.txt and 5 more files')
    assert partitions[-1].name.endswith(f'b.jsonl from {partitions[-1].file_ranges[0].start:,}')
