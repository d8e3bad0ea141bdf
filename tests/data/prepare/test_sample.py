from __future__ import annotations

import pytest

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.executor import TransientError
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.prepare import partitions as partitions_module
from maxlm.data.prepare import sample as sample_module
from maxlm.data.prepare import train_val_split
from maxlm.data.prepare.choose_validation import Cut, ValidationChoice
from maxlm.data.prepare.partitions import ReadSettings, make_partitions
from maxlm.data.prepare.sample import Preview
from maxlm.data.prepare.train_val_split import HASH_RANGE, name_hash
from maxlm.errors import InputError


@pytest.fixture
def preview(tmp_path, monkeypatch):
    """Returns a preview of twenty documents of 100 characters, each in a separate partition."""
    monkeypatch.setattr(partitions_module, 'MIN_GROUP_BYTES', 1)
    for i in range(20):
        (tmp_path / f'{i:02}.txt').write_text(chr(ord('a') + i) * 100)
    partitions = make_partitions(find_inputs([tmp_path]), [])
    assert len(partitions) == 20
    return Preview(partitions, [None] * 20, ReadSettings(ReadOptions(), False), (), skip_failed=False)


def ignore(_):
    pass


def test_the_sample_of_a_small_corpus_is_complete(preview):
    sizes: list[int] = []
    assert list(preview.texts(ValidationChoice(0), sizes.append)) == [chr(ord('a') + i) * 100 for i in range(20)]
    assert sizes == [100] * 20
    assert [document.name for document in preview.documents()] == [f'{i:02}.txt' for i in range(20)]


def test_the_sample_contains_only_training_text(preview):
    half = HASH_RANGE // 2
    expected = {chr(ord('a') + i) for i in range(20) if name_hash(f'{i:02}.txt') >= half}
    assert 4 < len(expected) < 16
    assert {text[0] for text in preview.texts(ValidationChoice(half), ignore)} == expected
    texts = list(preview.texts(ValidationChoice(0, Cut('03.txt', 60)), ignore))
    assert [len(text) for text in texts] == [100] * 3 + [60] + [100] * 16


def test_only_the_sampled_documents_of_a_large_corpus_are_read(preview, monkeypatch):
    monkeypatch.setattr(train_val_split, 'SAMPLE_BYTES', 120)
    monkeypatch.setattr(train_val_split, 'SAMPLE_PLACES', 4)
    read = []
    read_batches = sample_module.read_batches

    def read_and_record(partition, reading, skipped):
        read.append(partition.number)
        return read_batches(partition, reading, skipped)

    monkeypatch.setattr(sample_module, 'read_batches', read_and_record)
    assert list(preview.texts(ValidationChoice(0), ignore)) == [letter * 30 for letter in 'afkp']
    assert read == [0, 5, 10, 15]


def test_the_sample_is_never_empty(preview, monkeypatch):
    monkeypatch.setattr(train_val_split, 'SAMPLE_BYTES', 40)
    monkeypatch.setattr(train_val_split, 'SAMPLE_PLACES', 1)
    # Only this document is in the training split, and it is not at the sampled position.
    largest = max((name_hash(document.name), document.name) for document in preview.documents())
    assert largest[1] != '00.txt'
    (text,) = preview.texts(ValidationChoice(largest[0]), ignore)
    assert len(text) == 40
    assert list(preview.texts(ValidationChoice(largest[0] + 1), ignore)) == []


def test_a_transient_storage_error(preview, monkeypatch):
    read_batches = sample_module.read_batches

    def fail_once(partition, reading, skipped):
        if partition.number == 3:
            raise TransientError('03.txt: no answer')
        return read_batches(partition, reading, skipped)

    monkeypatch.setattr(sample_module, 'read_batches', fail_once)
    with pytest.raises(InputError, match=r'03\.txt: no answer; .*run the same command again'):
        list(preview.documents())
    lenient = Preview(preview.partitions, preview.decisions, preview.reading, (), skip_failed=True)
    assert len(list(lenient.documents())) == 19
