"""Collectives of parameters that are sharded to save memory, within `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

# Sharded dimensions of an array, with the mesh axes of each.
ShardedDims = tuple[tuple[int, tuple[str, ...]], ...]


def gather(x: jax.Array, dims: Sequence[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """Returns the complete array from the shards of all devices. Its gradient is reduce-scattered."""
    for dim, mesh_axes in dims:
        x = jax.lax.all_gather(x, mesh_axes, axis=dim, tiled=True)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def scatter_gradient(x: jax.Array, shard: jax.Array, dims: ShardedDims) -> jax.Array:
    """Returns x. Its gradient is reduce-scattered and becomes the gradient of `shard`, which is not read."""
    del shard, dims
    return x


def _forward(x: jax.Array, shard: jax.Array, dims: ShardedDims) -> tuple[jax.Array, None]:
    return scatter_gradient(x, shard, dims), None


def _backward(dims: ShardedDims, _: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    for dim, mesh_axes in dims:
        gradient = jax.lax.psum_scatter(gradient, mesh_axes, scatter_dimension=dim, tiled=True)
    return None, gradient


scatter_gradient.defvjp(_forward, _backward)
