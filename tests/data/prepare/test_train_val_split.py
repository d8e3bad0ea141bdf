from __future__ import annotations

import pytest

from maxlm.data.prepare import train_val_split
from maxlm.data.prepare.train_val_split import name_hash, sample_places, validation_threshold
from maxlm.errors import InputError


def test_validation_threshold():
    names = [f'{i}.txt' for i in range(1000)]
    hashes = sorted(map(name_hash, names))
    threshold = validation_threshold(iter(names), 0.1)
    assert 60 < sum(value < threshold for value in hashes) < 140
    assert validation_threshold(names, 0.0) == 0
    for share, expected in ((1e-9, 1), (1 - 1e-9, 999)):
        threshold = validation_threshold(names, share)
        assert sum(value < threshold for value in hashes) == expected
    assert validation_threshold(names[:1], 0.999999) == 0
    with pytest.raises(InputError, match='no text'):
        validation_threshold([], 0.1)


def test_only_the_required_names_are_read(monkeypatch):
    def endless_names():
        number = 0
        while True:
            read.append(number)
            yield f'{number}.txt'
            number += 1

    for share, limit in ((0.0, 1), (0.5, 100), (1e-15, 500)):
        read: list[int] = []
        monkeypatch.setattr(train_val_split, 'MAX_NAMES', 500)
        threshold = validation_threshold(endless_names(), share)
        assert len(read) <= limit
    # No document is below such a small fraction, so the document with the smallest hash is used for validation.
    assert threshold == min(name_hash(f'{i}.txt') for i in range(500)) + 1


def test_hashes_are_uniform_and_salted():
    values = [name_hash(str(i)) / train_val_split.HASH_RANGE for i in range(1000)]
    assert 0.47 < sum(values) / 1000 < 0.53
    assert name_hash('a') != name_hash('a', salt='x')
    assert name_hash('b\udcff') != name_hash('b')


def test_the_sample_spans_the_corpus(monkeypatch):
    monkeypatch.setattr(train_val_split, 'SAMPLE_BYTES', 100)
    monkeypatch.setattr(train_val_split, 'SAMPLE_PLACES', 4)
    assert sample_places([30, 40, 30]) == [0, 1, 2]
    # With one byte more than needed, positions are at equal distances, which select all partitions again.
    assert sample_places([30, 40, 31]) == [0, 1, 2]
    assert sample_places([100] * 8) == [0, 2, 4, 6]
    # A large partition contains several positions, small ones may contain none.
    assert sample_places([1, 1, 1000, 1, 1]) == [0, 2]
    assert sample_places([]) == []
