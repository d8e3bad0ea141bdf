"""Checksums of all items of a step, stored with the step and verified on restore.

    WORKDIR/checkpoints/<step>/checksums/metadata: {"version": 1, "params": {"embedding": "(61, 16) float32 1a2b3c4d"}}

The checksum of an array is the weighted sum of its elements' bits, read as unsigned integers, modulo 2³². Integer
arithmetic makes it independent of the sharding and of the number of processes. Each weight is an odd hash of the
element's position. An odd weight never maps a changed element to the same product, so a change of one element is
always detected. Hashed weights also detect rows or layers that were swapped.

Each device adds up its own shards, so the same pass over the arrays also compares the replicas; see `replicas`.

File systems protect array data at best in transit. Without these checksums, flipped bits would be restored silently.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from maxlm.checkpoint.item_metadata import (
    CorruptCheckpointError,
    descriptions,
    item_metadata,
    named_leaves,
    read_json,
    translate_errors,
)
from maxlm.checkpoint.replicas import check_replicas, replica_groups
from maxlm.model.blocks import BLOCKS
from maxlm.parallel.host_offload import on_host, to_device

ITEM = 'checksums'
VERSION = 1
JSON_ITEMS = ('progress', 'data')
# Bytes of an array that are read at a time, in complete chunks.
READ_BYTES = 2**26
# Elements whose weights are computed at a time.
CHUNK_ELEMENTS = 2**16

Sums = dict[str, str]  # dotted path → `shape type checksum`


def start_checksums(trees: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Starts computing the checksums of array items on the devices, without waiting for the results.

    Returns:
        item → uint32 [devices, leaves]: sums over the shards of each device of the mesh, in its order. The leaves are
        ordered by dotted path. Arrays without a mesh have one row. The result is replicated on all devices.
    """
    return {item: _start(tree) for item, tree in trees.items()}


def finish_checksums(
    trees: Mapping[str, Any], started: Mapping[str, jax.Array], *, occasion: str = ''
) -> dict[str, Sums]:
    """Waits for the checksums of `start_checksums`, and adds the paths, shapes and dtypes of the arrays.

    Args:
        trees: argument of `start_checksums`.
        started: its result.
        occasion: if not empty, the replicas are compared, and all processes call this together; see `check_replicas`.

    Raises:
        DeviceError: the replicas of an array differ.
    """
    device_sums = jax.device_get(dict(started))
    if occasion:
        check_replicas(trees, device_sums, occasion=occasion)
    return {item: _describe(descriptions(tree), _totals(tree, device_sums[item])) for item, tree in trees.items()}


def json_checksum(content: Mapping[str, Any]) -> Sums:
    """Returns the checksum of a JSON item, computed over its text with sorted keys."""
    text = json.dumps(content, sort_keys=True)
    return {'json': f'{zlib.crc32(text.encode()):08x}'}


def read_checksums(step_directory: epath.Path) -> dict[str, Sums] | None:
    """Returns the checksums stored with a step, by item, or None if the step was saved without checksums.

    Raises:
        CorruptCheckpointError: the checksums cannot be read.
    """
    path = step_directory / ITEM
    if not path.is_dir():
        return None
    content = read_json(path)
    version = content.pop('version', None)
    if version != VERSION or not all(isinstance(sums, dict) for sums in content.values()):
        raise CorruptCheckpointError(f'{path}: checksums are in a format that this version of maxlm does not support')
    return content


def check_items(step_directory: epath.Path, stored: Mapping[str, Sums]) -> None:
    """Checks that every item with a stored checksum exists.

    Raises:
        CorruptCheckpointError: an item is missing.
    """
    for item in sorted(stored):
        if not (step_directory / item).is_dir():
            raise CorruptCheckpointError(f'{step_directory / item}: missing from the checkpoint')


def verify_checksums(path: epath.Path, stored: Mapping[str, Sums], found: Sums) -> None:
    """Compares the checksums of one item.

    Args:
        path: path of the item; its name is the key in `stored`.
        stored: result of `read_checksums`.
        found: checksums of the values that were read.

    Raises:
        CorruptCheckpointError: the checksums differ. The message names the first leaf that differs and their number.
    """
    expected = stored.get(path.name)
    if expected is None:
        raise CorruptCheckpointError(f'{path}: has no checksum, although other items of this step have one')
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        rest = f', and {len(wrong) - 1} more' if len(wrong) > 1 else ''
        raise CorruptCheckpointError(
            f'{path}: damaged: {name} has checksum {found.get(name, "none")}, expected '
            f'{expected.get(name, "none")}{rest}'
        )


def check_descriptions(path: epath.Path, stored: Mapping[str, Sums], found: Mapping[str, str]) -> None:
    """Compares the array descriptions of an item with the saved ones. Corrupt descriptions look like another model.

    Args:
        path: path of the item.
        stored: result of `read_checksums`.
        found: `descriptions` of the item.

    Raises:
        CorruptCheckpointError: the descriptions differ.
    """
    saved = {name: text.rpartition(' ')[0] for name, text in stored.get(path.name, {}).items()}
    if saved != found:
        name = min(saved.items() ^ found.items())[0]
        raise CorruptCheckpointError(
            f'{path}: damaged: {name} is described as {found.get(name, "missing")}, expected '
            f'{saved.get(name, "no array")}'
        )


def corrupt_arrays(step_directory: epath.Path) -> tuple[list[str], int]:
    """Reads a complete step in chunks and compares it with its checksums.

    Returns:
        One line for each corrupt item, and the number of compared checksums. It is 0 if the step has no checksums.
    """
    found: list[str] = []
    try:
        stored = read_checksums(step_directory)
        progress = read_json(step_directory / JSON_ITEMS[0])
    except CorruptCheckpointError as error:
        return [str(error)], 0
    if stored is None:
        lost = [f'{step_directory / ITEM}: missing from the checkpoint'] if ITEM in progress else []
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
    """Returns the checksum of an array, or of a slice of one that starts at element `first` in C order."""
    bits = np.ascontiguousarray(values).reshape(-1)
    bits = bits.view(np.dtype(f'u{bits.dtype.itemsize}'))
    total = 0
    # The weights of one chunk fit into the CPU cache and need little memory.
    for start in range(0, bits.size, CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS]
        # Positions wrap at 2³², as on the device.
        positions = np.arange(chunk.size, dtype=np.uint32) + np.uint32((first + start) % 2**32)
        total += int(np.sum(chunk.astype(np.uint32) * _weights(positions), dtype=np.uint32))
    return total % 2**32


def _weights(positions: Any) -> Any:
    """Returns an odd hash of each position, for NumPy and JAX arrays (steps of the MurmurHash3 finalizer)."""
    hashes = positions * np.uint32(0x9E3779B1)
    hashes = (hashes ^ (hashes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes = hashes ^ (hashes >> np.uint32(13))
    return hashes | np.uint32(1)


def _start(tree: Any) -> jax.Array:
    leaves = named_leaves(tree)
    names = sorted(leaves)
    arrays = [jnp.asarray(leaves[name]) for name in names]
    shardings = [array.sharding for array in arrays]
    mesh = shardings[0].mesh if isinstance(shardings[0], NamedSharding) else None
    specs = tuple(sharding.spec if isinstance(sharding, NamedSharding) else None for sharding in shardings)
    return _sums(arrays, tuple(BLOCKS in name.split('.') for name in names), mesh, specs)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sums(
    arrays: list[jax.Array], stacked: tuple[bool, ...], mesh: Mesh | None, specs: tuple[PartitionSpec | None, ...]
) -> jax.Array:
    shapes = [x.shape for x in arrays]

    def on_device(shards: list[jax.Array]) -> jax.Array:
        return jnp.stack([_sum(*each) for each in zip(shards, shapes, specs, stacked, strict=True)])[None]

    if mesh is None:
        return on_device(arrays)
    # Within `shard_map`, each device reads what it holds. Otherwise XLA could use the replica of another device.
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )
    # Replicated, so that each process can read the sums.
    return jax.lax.with_sharding_constraint(mapped(arrays), NamedSharding(mesh, PartitionSpec()))


def _sum(shard: jax.Array, shape: tuple[int, ...], spec: PartitionSpec | None, stacked: bool) -> jax.Array:
    """Returns the sum over one shard of an array of this shape, with positions in the array."""
    strides = [np.uint32(math.prod(shape[dim + 1 :]) % 2**32) for dim in range(len(shape))]
    first = jnp.uint32(0)
    for names, size, stride in zip(spec or (), shard.shape, strides, strict=False):
        if names is not None:
            first += jax.lax.axis_index(names).astype(jnp.uint32) * (np.uint32(size) * stride)
    if stacked and on_host(shard):
        # One layer at a time, because the complete stack might not fit into device memory.
        firsts = first + jnp.arange(shard.shape[0], dtype=jnp.uint32) * strides[0]
        sums = jax.lax.map(lambda layer: _sum_from(to_device(layer[0]), strides[1:], layer[1]), (shard, firsts))
        return sums.sum(dtype=jnp.uint32)
    return _sum_from(to_device(shard), strides, first)


def _sum_from(x: jax.Array, strides: Sequence[np.uint32], first: jax.Array) -> jax.Array:
    """Computes `array_checksum` on a device."""
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        unsigned = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    positions = jnp.full(x.shape, first)
    for axis, stride in enumerate(strides):
        positions += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    return jnp.sum(bits * _weights(positions), dtype=jnp.uint32)


def _totals(tree: Any, device_sums: np.ndarray) -> np.ndarray:
    leaves = named_leaves(tree)
    columns = [
        device_sums[replica_groups(leaves[name])[:, 0], place].sum(dtype=np.uint32)
        for place, name in enumerate(sorted(leaves))
    ]
    return np.asarray(columns, np.uint32)


def _describe(texts: Mapping[str, str], values: np.ndarray) -> Sums:
    return {name: f'{texts[name]} {int(value):08x}' for name, value in zip(sorted(texts), values, strict=True)}


def _stored_sums(path: epath.Path) -> Sums:
    """Reads an item of arrays from storage and returns its checksums."""
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
    """Yields indices of row blocks of a stored array. Each block consists of complete chunks."""
    if not array.shape:
        yield ...
        return
    chunk_rows = (array.chunk_layout.read_chunk.shape or array.shape)[0] or 1
    row_bytes = max(1, array.dtype.numpy_dtype.itemsize * math.prod(array.shape[1:]))
    rows = max(1, READ_BYTES // (row_bytes * chunk_rows)) * chunk_rows
    for start in range(0, array.shape[0], rows):
        yield slice(start, min(start + rows, array.shape[0]))
