"""Moves arrays between host memory and device memory. Arrays in host memory cannot be used in computations."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

HOST = 'pinned_host'

Tree = TypeVar('Tree')


def on_host(x: jax.Array) -> bool:
    """Returns True if an array, possibly traced, is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def to_device(tree: Tree) -> Tree:
    """Returns the tree in device memory with the same sharding."""
    moved: Tree = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree)
    return moved


def like(old: Any, new: Tree) -> Tree:
    """Returns `new` with each array in host memory if the corresponding array of `old` is."""
    moved: Tree = jax.tree.map(lambda was, x: jax.device_put(x, jax.memory.Space.Host) if on_host(was) else x, old, new)
    return moved


def fetch(tree: Tree, slots: Any) -> Tree:
    """Returns `to_device(tree)` with a gradient that is defined by `slots`.

    `slots` is a tree of arrays of the same shapes on the device; their values are not used. The gradient with respect
    to an array in host memory would be moved to host memory; the gradient with respect to its slot stays on the device.
    If `slots` is None, there is no gradient.
    """
    if slots is None:
        return to_device(tree)
    fetched: Tree = jax.tree.map(_fetch, tree, slots)
    return fetched


@jax.custom_vjp
def _fetch(x: jax.Array, slot: jax.Array) -> jax.Array:
    del slot
    return to_device(x)


_fetch.defvjp(lambda x, slot: (_fetch(x, slot), None), lambda _, gradient: (None, gradient))
