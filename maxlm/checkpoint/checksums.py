"""Checksums of everything in a step, stored with it: what is restored is what was saved, or the step is damaged.

    WORKDIR/checkpoints/<step>/checksums/metadata: {"version": 1, "params": {"embedding": "(61, 16) float32 1a2b3c4d"}}

An array's is the sum of its elements' bits, as unsigned integers, each times a weight of its position, modulo 2³². Made
of integers, it is the same for any sharding and number of processes. Weights are odd: no change of an element times any
of them is 0, so a change of one element is always found. They are hashes of the position, so that rows or layers that
changed places are found too.

The file systems below have checksums of their own at best for what is on its way: bits that flip in array data are
otherwise restored without a word.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from maxlm.checkpoint.item_metadata import (
    CorruptCheckpointError,
    descriptions,
    item_metadata,
    named_leaves,
    read_json,
    translate_errors,
)
from maxlm.model.blocks import BLOCKS
from maxlm.parallel.host_offload import on_host, to_device

ITEM = 'checksums'
VERSION = 1
JSON_ITEMS = ('progress', 'data')
# Bytes of an array that are read at a time, as whole pieces of it.
READ_BYTES = 2**26
# Elements whose weights are made at a time.
CHUNK_ELEMENTS = 2**16

Sums = dict[str, str]  # dotted path → `shape type checksum`


def start_checksums(trees: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Has the devices compute the checksums of items of arrays; does not wait for them.

    Returns:
        item → uint32 of the sorted dotted paths of its leaves, on all devices.
    """
    return {item: _start(tree) for item, tree in trees.items()}


def finish_checksums(trees: Mapping[str, Any], started: Mapping[str, jax.Array]) -> dict[str, Sums]:
    """What `start_checksums` began, with the paths, shapes and types that belong to it."""
    values = jax.device_get(dict(started))
    return {item: _describe(descriptions(tree), values[item]) for item, tree in trees.items()}


def json_checksum(content: Mapping[str, Any]) -> Sums:
    """Of an item that is JSON: of its text with sorted keys."""
    text = json.dumps(content, sort_keys=True)
    return {'json': f'{zlib.crc32(text.encode()):08x}'}


def read_checksums(step_directory: epath.Path) -> dict[str, Sums] | None:
    """The checksums that lie with a step, by item; None where it was saved without.

    Raises:
        DamagedError: they cannot be read.
    """
    path = step_directory / ITEM
    if not path.is_dir():
        return None
    content = read_json(path)
    version = content.pop('version', None)
    if version != VERSION or not all(isinstance(sums, dict) for sums in content.values()):
        raise CorruptCheckpointError(f'{path}: holds no checksums that this version of maxlm knows')
    return content


def check_items(step_directory: epath.Path, stored: Mapping[str, Sums]) -> None:
    """Whether all items are there that were saved.

    Raises:
        DamagedError: one is missing.
    """
    for item in sorted(stored):
        if not (step_directory / item).is_dir():
            raise CorruptCheckpointError(f'{step_directory / item}: missing in the checkpoint')


def verify_checksums(path: epath.Path, stored: Mapping[str, Sums], found: Sums) -> None:
    """Compares the checksums of one item.

    Args:
        path: of the item; its name is looked up in `stored`.
        stored: as `read_checksums` returns them.
        found: of what was read.

    Raises:
        DamagedError: they differ; the message names all leaves that do.
    """
    expected = stored.get(path.name)
    if expected is None:
        raise CorruptCheckpointError(f'{path}: has no checksum, although others of this step have')
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        rest = f', and {len(wrong) - 1} more' if len(wrong) > 1 else ''
        raise CorruptCheckpointError(
            f'{path}: damaged: {name} is {found.get(name, "missing")}, was saved as '
            f'{expected.get(name, "nothing of that name")}{rest}'
        )


def check_descriptions(path: epath.Path, stored: Mapping[str, Sums], found: Mapping[str, str]) -> None:
    """Whether an item still describes the arrays that were saved: damage of that looks like another model.

    Args:
        path: of the item.
        stored: as `read_checksums` returns them.
        found: `descriptions` of what lies there.

    Raises:
        DamagedError: it does not.
    """
    saved = {name: text.rpartition(' ')[0] for name, text in stored.get(path.name, {}).items()}
    if saved != found:
        name = min(saved.items() ^ found.items())[0]
        raise CorruptCheckpointError(
            f'{path}: damaged: {name} is described as {found.get(name, "missing")}, was saved as '
            f'{saved.get(name, "nothing of that name")}'
        )


def corrupt_arrays(step_directory: epath.Path) -> tuple[list[str], int]:
    """Reads all of a step, a piece at a time, and compares it with its checksums.

    Returns:
        One line for each item that is damaged; and the number of checksums that were compared, 0 for a step that was
        saved without.
    """
    found: list[str] = []
    try:
        stored = read_checksums(step_directory)
        progress = read_json(step_directory / JSON_ITEMS[0])
    except CorruptCheckpointError as error:
        return [str(error)], 0
    if stored is None:
        lost = [f'{step_directory / ITEM}: missing in the checkpoint'] if ITEM in progress else []
        return lost, 0
    for item in sorted(stored):
        path = step_directory / item
        try:
            check_items(step_directory, {item: stored[item]})
            sums = json_checksum(read_json(path)) if item in JSON_ITEMS else _stored_sums(path)
            verify_checksums(path, stored, sums)
        except CorruptCheckpointError as error:
            found.append(str(error))
    return found, sum(map(len, stored.values()))


def array_checksum(values: np.ndarray, first: int = 0) -> int:
    """The checksum of an array, or the part of one that begins with its element number `first` in C order."""
    bits = np.ascontiguousarray(values).reshape(-1)
    bits = bits.view(np.dtype(f'u{bits.dtype.itemsize}'))
    total = 0
    # The weights of a part stay in the cache, and need no room worth mentioning.
    for start in range(0, bits.size, CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS]
        # Positions are counted modulo 2³², as on the device.
        positions = np.arange(chunk.size, dtype=np.uint32) + np.uint32((first + start) % 2**32)
        total += int(np.sum(chunk.astype(np.uint32) * _weights(positions), dtype=np.uint32))
    return total % 2**32


def _weights(positions: Any) -> Any:
    """An odd hash of each position, for arrays of NumPy and of JAX; steps of the finalizer of MurmurHash3."""
    hashes = positions * np.uint32(0x9E3779B1)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = hashes ^ (hashes >> np.uint32(13))
    return hashes | np.uint32(1)


def _start(tree: Any) -> jax.Array:
    leaves = named_leaves(tree)
    names = sorted(leaves)
    arrays = [jnp.asarray(leaves[name]) for name in names]
    # One process can read what is on all devices.
    sharding = arrays[0].sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return _sums(arrays, tuple(BLOCKS in name.split('.') for name in names), everywhere)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sums(arrays: list[jax.Array], stacked: tuple[bool, ...], everywhere: NamedSharding | None) -> jax.Array:
    sums = jnp.stack([_sum(x, is_stacked) for x, is_stacked in zip(arrays, stacked, strict=True)])
    return sums if everywhere is None else jax.lax.with_sharding_constraint(sums, everywhere)


def _sum(x: jax.Array, stacked: bool) -> jax.Array:
    if stacked and on_host(x):
        # A layer at a time, or the device would need room for the stack.
        size = np.uint32(math.prod(x.shape[1:]) % 2**32)
        firsts = jnp.arange(x.shape[0], dtype=jnp.uint32) * size
        return jax.lax.map(lambda layer: _sum_from(to_device(layer[0]), layer[1]), (x, firsts)).sum(dtype=jnp.uint32)
    return _sum_from(to_device(x), jnp.uint32(0))


def _sum_from(x: jax.Array, first: jax.Array) -> jax.Array:
    """`array_checksum` on a device."""
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        unsigned = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    positions, stride = jnp.full(x.shape, first), 1
    for axis in reversed(range(x.ndim)):
        positions += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return jnp.sum(bits * _weights(positions), dtype=jnp.uint32)


def _describe(texts: Mapping[str, str], values: np.ndarray) -> Sums:
    return {name: f'{texts[name]} {int(value):08x}' for name, value in zip(sorted(texts), values, strict=True)}


def _stored_sums(path: epath.Path) -> Sums:
    """Checksums of an item of arrays, from where it lies."""
    tree = item_metadata(path)
    texts, leaves = descriptions(tree), named_leaves(tree)
    context = type_handlers.get_ts_context()

    def read(leaf: Any) -> int:
        info = type_handlers.ParamInfo(name=leaf.name, parent_dir=path, use_zarr3=tree.use_zarr3, ts_context=context)
        spec = type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        array = tensorstore.open(tensorstore.Spec(spec), open=True, context=context).result()
        total = 0
        for rows in _row_blocks(array):
            values = np.asarray(array[rows].read().result())
            total += array_checksum(values, 0 if rows is ... else rows.start * math.prod(array.shape[1:]))
        return total % 2**32

    values = []
    for name in sorted(texts):
        leaf = leaves[name]
        values.append(translate_errors(path / name, functools.partial(read, leaf)))
    return _describe(texts, np.asarray(values, np.uint32))


def _row_blocks(array: tensorstore.TensorStore) -> Iterator[Any]:
    """Indices of parts of a stored array: whole pieces, in rows of them."""
    if not array.shape:
        yield ...
        return
    chunk_rows = (array.chunk_layout.read_chunk.shape or array.shape)[0] or 1
    row_bytes = max(1, array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:]))
    rows = max(1, READ_BYTES // (row_bytes * chunk_rows)) * chunk_rows
    for start in range(0, array.shape[0], rows):
        yield slice(start, min(start + rows, array.shape[0]))
