"""The reference of preferences and of rewards: the model that a run starts from, which stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.keys import Config
from maxlm.training.optimizer import kind_of
from maxlm.training.trained import ADAPTERS, Tree


def holds_reference(config: Config) -> bool:
    """Whether the state holds a copy: where only adapters are trained, the model without them is the reference."""
    return config.has_reference and not (config.model.lora_rank and not config.optimizer.trained)


def stored_dtype(config: Config, path: tuple[Any, ...]) -> jnp.dtype:
    """In which a parameter of the reference is kept: that in which the model computes with it, so nothing is lost."""
    return jnp.dtype(jnp.float32 if kind_of(path) == 'vector' else config.model.dtype)


def as_reference(config: Config, params: Tree) -> Any:
    """A copy of parameters as they are kept."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: jnp.array(param, stored_dtype(config, path), copy=True), params
    )


def without_adapters(params: Tree) -> Any:
    """The parameters with adapters that add nothing."""
    return {
        key: without_adapters(value)
        if isinstance(value, Mapping)
        else jnp.zeros_like(value)
        if key == ADAPTERS[1]
        else value
        for key, value in params.items()
    }
