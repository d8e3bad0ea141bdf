"""Checksums of arrays: equal for all shardings and on the host, and sensitive to every small change."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.checkpoint.checksums import (
    array_checksum,
    check_descriptions,
    finish_checksums,
    json_checksum,
    start_checksums,
)
from maxlm.checkpoint.item_metadata import CorruptCheckpointError

RNG = np.random.default_rng(0)
ARRAYS = {
    'float32': RNG.normal(size=(8, 4, 6)).astype(np.float32),
    'bfloat16': RNG.normal(size=(16, 24)).astype(jnp.bfloat16),
    'float16': RNG.normal(size=(8, 8)).astype(np.float16),
    'int32': RNG.integers(-(2**31), 2**31, (8, 24)).astype(np.int32),
    'uint8': RNG.integers(0, 256, (8, 24)).astype(np.uint8),
    'int8': RNG.integers(-128, 128, (32, 8)).astype(np.int8),
    'bool': RNG.integers(0, 2, (8, 8)).astype(bool),
}


def checksum(tree):
    trees = {'params': tree}
    return finish_checksums(trees, start_checksums(trees))['params']


def plain(values):
    """Computes the checksum by definition, element by element with Python integers."""
    total = 0
    bits = values.reshape(-1).view(f'u{values.itemsize}')
    for position, value in enumerate(bits.tolist()):
        hashed = position * 0x9E3779B1 % 2**32
        hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B % 2**32
        hashed ^= hashed >> 13
        total += value * (hashed | 1)
    return total % 2**32


@pytest.mark.parametrize('name', ARRAYS)
def test_device_and_host_match_the_definition(name):
    values = ARRAYS[name]
    assert array_checksum(values) == plain(values)
    assert checksum({'x': jnp.asarray(values)}) == {'x': f'{values.shape} {name} {plain(values):08x}'}


@pytest.mark.parametrize('shape', [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_checksum_is_equal_on_every_mesh(shape):
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ('a', 'b'))
    values = np.arange(16 * 8 * 3, dtype=np.float32).reshape(16, 8, 3)
    wanted = {'blocks.x': f'(16, 8, 3) float32 {plain(values):08x}', 'y': f'() int32 {plain(np.int32([7])):08x}'}
    for spec in (PartitionSpec(), PartitionSpec('a', 'b'), PartitionSpec('b', None), PartitionSpec(('b', 'a'))):
        placed = jax.device_put(values, NamedSharding(mesh, spec))
        y = jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec()))
        assert checksum({'y': y, 'blocks': {'x': placed}}) == wanted


def test_checksum_is_equal_in_host_memory():
    mesh = Mesh(np.array(jax.devices()), ('a',))
    values = RNG.normal(size=(4, 8, 16)).astype(np.float32)
    for name in ('blocks', 'head'):
        sharding = NamedSharding(mesh, PartitionSpec(None, 'a'), memory_kind='pinned_host')
        sums = checksum({name: {'x': jax.device_put(values, sharding)}})
        assert sums == {f'{name}.x': f'(4, 8, 16) float32 {plain(values):08x}'}


def test_parts_add_up():
    values = ARRAYS['float32']
    size = values[0].size
    parts = sum(array_checksum(values[start : start + 3], start * size) for start in range(0, 8, 3))
    assert parts % 2**32 == array_checksum(values)


def test_every_bit_counts():
    values = RNG.normal(size=(4, 8)).astype(np.float32)
    original = array_checksum(values)
    for element in range(values.size):
        for bit in range(32):
            flipped = values.copy()
            flipped.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
            assert array_checksum(flipped) != original, (element, bit)
    assert array_checksum(values.copy()) == original


def test_swapped_rows_change_the_checksum():
    # With round numbers and powers of two, weights that only count would miss the change.
    values = np.repeat(np.float32([1, 2, 0.5, 4]), 1024).reshape(4, 1024)
    for first, second in ((0, 1), (0, 2), (1, 3)):
        order = [0, 1, 2, 3]
        order[first], order[second] = second, first
        assert array_checksum(values[order]) != array_checksum(values)
    assert array_checksum(values[[0, 1, 2, 3]]) == array_checksum(values)


def test_json():
    content = {'step': 7, 'losses': [0.1, 2.0], 'text': 'ß'}
    assert json_checksum(content) == json_checksum(dict(reversed(content.items())))
    assert json_checksum(content) != json_checksum({**content, 'step': 8})


def test_changed_metadata_is_damage():
    stored = {'params': {'head.kernel': '(2, 3) float32 00000001', 'head.bias': '() int32 00000002'}}
    described = {'head.kernel': '(2, 3) float32', 'head.bias': '() int32'}
    check_descriptions(Path('7/params'), stored, described)
    for change in ({'head.kernel': '(2, 3) bfloat16'}, {'head.kernel': '(3, 2) float32'}, {'more': '() int32'}):
        with pytest.raises(CorruptCheckpointError, match=rf'7/params: damaged: {min(change)} is described as'):
            check_descriptions(Path('7/params'), stored, {**described, **change})
    with pytest.raises(CorruptCheckpointError, match=r'head\.bias is described as missing'):
        check_descriptions(Path('7/params'), stored, {'head.kernel': '(2, 3) float32'})
