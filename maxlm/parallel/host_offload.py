"""Arrays in host memory, and their way to the device. Nothing may compute with them where they are."""

from __future__ import annotations

from typing import Any

import jax

HOST = 'pinned_host'

Tree = Any


def on_host(x: jax.Array) -> bool:
    """Whether an array, perhaps a traced one, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """The same in the device's memory, sharded as it is."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree)


def like(old: Tree, new: Tree) -> Tree:
    """`new`, in host memory where `old` is."""
    return jax.tree.map(lambda was, x: jax.device_put(x, jax.memory.Space.Host) if on_host(was) else x, old, new)


def fetch(tree: Tree, slots: Tree | None) -> Tree:
    """`to_device`, whose gradient is that of `slots`, a tree of arrays of the same shapes on the device.

    The gradient of an array in host memory would be sent there. The slots' values are not used; None: no gradient.
    """
    return to_device(tree) if slots is None else jax.tree.map(_fetch, tree, slots)


@jax.custom_vjp
def _fetch(x: jax.Array, slot: jax.Array) -> jax.Array:
    del slot
    return to_device(x)


_fetch.defvjp(lambda x, slot: (_fetch(x, slot), None), lambda _, gradient: (None, gradient))
