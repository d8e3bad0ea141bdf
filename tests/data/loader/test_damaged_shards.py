"""Tests that damage to a shard is reported before training uses a token of it."""

import random

import numpy as np
import pytest

from maxlm.data.dataset.records import load_manifest, verify
from maxlm.data.loader.windows import Sequences
from maxlm.errors import InputError
from tests.damage import cut, flip, remove
from tests.faults import how_many, measured

WIDTH = 64


def read(path):
    windows = Sequences(load_manifest(path), 'train', WIDTH)
    return [windows.stream(number) for number in range(len(windows))]


def same(streams, expected):
    return all(
        np.array_equal(stream, expected_stream) for stream, expected_stream in zip(streams, expected, strict=True)
    )


def test_damage_is_detected_before_training(make_dataset, record_property):
    rng = random.Random(0)
    numbers = np.random.default_rng(0)
    shards = [[numbers.integers(1, 1000, 30_000).tolist()] for _ in range(3)]
    dataset = make_dataset(shards, block=WIDTH)
    expected = read(dataset.path)
    detected, harmless = 0, 0
    trials = how_many(30, 201)
    for number in range(trials):
        damage = (flip, cut, remove)[number % 3]
        path = dataset.path / f'train-{number // 3 % 3:05d}.arrayrecord'
        content = path.read_bytes()
        damage(path, rng)
        try:
            streams, message = read(dataset.path), ''
        except InputError as error:
            streams, message = None, str(error)
        if streams is None:
            assert str(path) in message
            assert '\n' not in message
            detected += 1
        else:
            # The flipped bit is in bytes of the format that contain no token.
            assert damage is flip
            assert same(streams, expected)
            harmless += 1
        # Checksums of complete files are compared.
        with pytest.raises(InputError, match=path.name):
            verify(load_manifest(dataset.path))
        path.write_bytes(content)
    # Negative controls: the restored file is read, and other tokens differ.
    verify(load_manifest(dataset.path))
    assert same(read(dataset.path), expected)
    shards[0][0][0] += 1
    assert not same(read(make_dataset(shards, block=WIDTH, directory='other').path), expected)
    assert detected > harmless
    measured(
        record_property,
        'data',
        f'{trials} damages: {detected} reported while reading, {harmless} bit flips in bytes without a token; '
        f'silent: 0; verification of complete files detects {trials} of {trials}',
    )
