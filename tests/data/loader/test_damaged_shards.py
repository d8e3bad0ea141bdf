"""Damaged shards: any damage is reported before a token of the shard is trained on."""

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


def same(streams, others):
    return all(np.array_equal(one, other) for one, other in zip(streams, others, strict=True))


def test_no_damage_is_trained_on(make_dataset, record_property):
    rng = random.Random(0)
    numbers = np.random.default_rng(0)
    shards = [[numbers.integers(1, 1000, 30_000).tolist()] for _ in range(3)]
    dataset = make_dataset(shards, block=WIDTH)
    wanted = read(dataset.path)
    found, idle = 0, 0
    tries = how_many(30, 201)
    for number in range(tries):
        damage = (flip, cut, remove)[number % 3]
        path = dataset.path / f'train-{number // 3 % 3:05d}.arrayrecord'
        content = path.read_bytes()
        damage(path, rng)
        try:
            streams, told = read(dataset.path), ''
        except InputError as error:
            streams, told = None, str(error)
        if streams is None:
            assert str(path) in told
            assert '\n' not in told
            found += 1
        else:
            # The flipped bit is in bytes of the format that contain no token.
            assert damage is flip
            assert same(streams, wanted)
            idle += 1
        # Checksums of complete files are compared.
        with pytest.raises(InputError, match=path.name):
            verify(load_manifest(dataset.path))
        path.write_bytes(content)
    # Negative controls: the restored file is read, and other tokens differ.
    verify(load_manifest(dataset.path))
    assert same(read(dataset.path), wanted)
    shards[0][0][0] += 1
    assert not same(read(make_dataset(shards, block=WIDTH, directory='other').path), wanted)
    assert found > idle
    measured(
        record_property,
        'data',
        f'{tries} damages: {found} named as they were read, {idle} bit flips in bytes without a token; silent: 0; '
        f'the check of whole files finds {tries} of {tries}',
    )
