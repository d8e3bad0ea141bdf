"""Layer-by-layer update of state in host memory.

A loop over layers copies one slice to the device, updates it and copies it back. The device therefore holds the state
of about one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.model.blocks import BLOCKS
from maxlm.parallel.host_offload import like, on_host, to_device

Tree = Any
# (gradients, old tree, old tree, …) → new trees. Each tree contains dicts with the names of all parameters.
Update = Callable[..., tuple[Tree, ...]]


def layer_by_layer(update: Update) -> Update:
    """Returns the same update, applied to the state outside of the blocks and then to the blocks layer by layer.

    Arrays in host memory are copied to the device for the update, and the results are copied back.
    """

    def streamed(grads: Tree, *old: Tree) -> tuple[Tree, ...]:
        rest = _only(False, (grads, *old))
        new_rest = like(rest[1:], update(*to_device(rest)))

        blocks = _only(True, (grads, *old))
        leaves, treedef = jax.tree.flatten(blocks)
        is_stacked = _stacked(blocks)

        def update_layer(_: None, layer: list[jax.Array]) -> tuple[None, list[jax.Array]]:
            slices = iter(layer)
            one = jax.tree.unflatten(
                treedef, [next(slices) if stacked else x for x, stacked in zip(leaves, is_stacked, strict=True)]
            )
            new = like(one[1:], update(*to_device(one)))
            return None, [x for x, stacked in zip(jax.tree.leaves(new), _stacked(new), strict=True) if stacked]

        stacks = [x for x, stacked in zip(leaves, is_stacked, strict=True) if stacked]
        _, new_stacks = jax.lax.scan(update_layer, None, stacks)
        # Both trees contain the counters; the update of `rest` has already incremented them.
        results = iter(new_stacks)
        leaves, treedef = jax.tree.flatten(blocks[1:])
        new_blocks = jax.tree.unflatten(
            treedef, [next(results) if stacked else x for x, stacked in zip(leaves, _stacked(blocks[1:]), strict=True)]
        )

        def merge(was: Tree, new_rest: Tree, new_blocks: Tree) -> Tree:
            return {**new_rest, **new_blocks} if _is_params(was) else new_rest

        merged: tuple[Tree, ...] = jax.tree.map(merge, old, new_rest, new_blocks, is_leaf=_is_params)
        return merged

    return streamed


def global_norm(tree: Tree) -> jax.Array:
    """Returns the global norm of a tree, as `optax.tree.norm`; stacks in host memory are read one layer at a time."""
    leaves = jax.tree.leaves(tree)
    if not any(map(on_host, leaves)):
        return optax.tree.norm(tree)

    def squares(x: jax.Array, stacked: bool) -> jax.Array:
        if stacked and on_host(x):
            sums: jax.Array = jax.lax.map(lambda one: jnp.sum(jnp.square(to_device(one))), x)
            return sums.sum()
        return jnp.sum(jnp.square(to_device(x)))

    return jnp.sqrt(sum(map(squares, leaves, _stacked(tree)), start=jnp.zeros(())))


def _is_params(tree: Tree) -> bool:
    return isinstance(tree, dict) and BLOCKS in tree


def _only(of_blocks: bool, tree: Tree) -> Tree:
    """Returns the tree with only the parameters of the blocks, or with only the other parameters."""

    def select(node: Tree) -> Tree:
        return {k: v for k, v in node.items() if (k == BLOCKS) == of_blocks} if _is_params(node) else node

    return jax.tree.map(select, tree, is_leaf=_is_params)


def _stacked(tree: Tree) -> list[bool]:
    """Returns one boolean per leaf, True if the leaf is stacked over layers."""
    return [BLOCKS in [getattr(key, 'key', None) for key in path] for path, _ in jax.tree.leaves_with_path(tree)]
