"""Known answers of collectives along each axis of a mesh: sums of integers, which are exact in float32.

Shapes: W values of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Values of one device: 1 MiB in float32, which NCCL sends with its protocol for large messages.
WIDTH = 2**18
# Values are below this number, so that sums over thousands of devices are exact in float32.
LARGEST = 997


def wrong_collective(mesh: Mesh, width: int = WIDTH) -> str:
    """Runs all-reduce, all-gather, reduce-scatter and all-to-all along each axis of a mesh. All processes call it.

    Returns:
        The collective, its axis and the devices of this process with wrong results; '' if all results are exact.
    """
    for axis, group in mesh.shape.items():
        if group == 1:
            continue
        # Each device of a group needs a part of the values.
        size = -(-width // group) * group
        for name, collective, expect in (
            ('all-reduce', _all_reduce, _reduced),
            ('all-gather', _all_gather, _gathered),
            ('reduce-scatter', _reduce_scatter, _scattered),
            ('all-to-all', _all_to_all, _exchanged),
        ):
            wrong = _wrong_devices(mesh, axis, size, collective, expect)
            if wrong:
                listed = ', '.join(map(str, wrong))
                return (
                    f'{name} of {size:,} numbers along mesh.{axis}={group} is wrong on device {listed}; check the '
                    'devices and their links'
                )
    return ''


def values(device: jax.Array | int, size: int) -> jax.Array:
    """Returns the values [W] of the device with this index in its group."""
    return ((jnp.arange(size, dtype=jnp.int32) * 31 + device * 17) % LARGEST).astype(jnp.float32)


def _wrong_devices(
    mesh: Mesh, axis: str, size: int, collective: Callable[..., jax.Array], expect: Callable[..., jax.Array]
) -> list[int]:
    """Returns the ids of the local devices on which a collective differs from its known result."""

    def count_differences() -> jax.Array:
        index, group = jax.lax.axis_index(axis), mesh.shape[axis]
        found = collective(values(index, size), axis)
        # Every device computes the values of its group itself. The negated comparison also counts NaN.
        is_wrong = ~(found == expect(index, group, size))
        return is_wrong.sum().reshape((1,) * len(mesh.axis_names))

    spec = PartitionSpec(*mesh.axis_names)
    run = jax.jit(
        jax.shard_map(count_differences, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False),
        out_shardings=NamedSharding(mesh, spec),
    )
    return [shard.device.id for shard in run().addressable_shards if np.asarray(shard.data).any()]


_all_reduce = jax.lax.psum
_all_gather = partial(jax.lax.all_gather, tiled=True)
_reduce_scatter = partial(jax.lax.psum_scatter, tiled=True)
_all_to_all = partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True)


def _reduced(index: jax.Array, group: int, size: int) -> jax.Array:
    del index
    return sum((values(device, size) for device in range(1, group)), values(0, size))


def _gathered(index: jax.Array, group: int, size: int) -> jax.Array:
    del index
    return jnp.concatenate([values(device, size) for device in range(group)])


def _scattered(index: jax.Array, group: int, size: int) -> jax.Array:
    return _part(_reduced(index, group, size), index, group)


def _exchanged(index: jax.Array, group: int, size: int) -> jax.Array:
    return jnp.concatenate([_part(values(device, size), index, group) for device in range(group)])


def _part(x: jax.Array, index: jax.Array, group: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * (len(x) // group), len(x) // group)
