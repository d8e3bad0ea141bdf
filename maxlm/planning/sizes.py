"""How large a model and its training state are, from their abstract arrays."""

from __future__ import annotations

from typing import Any

import jax

from maxlm.training.state import TrainState


def num_parameters(params: Any) -> int:
    """Elements of all arrays of a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def training_bytes(state: TrainState) -> int:
    """Bytes that live through a whole step, over all devices: the state, and a gradient for each parameter."""
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(state.params)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
