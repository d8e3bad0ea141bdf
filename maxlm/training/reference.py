"""The reference of preferences and of rewards: the model that a run starts from, which stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.model.layers.lora import LORA_B
from maxlm.training.optimizers.optimizer import kind_of
from maxlm.training.optimizers.trainable import Tree


def has_reference_params(config: Config) -> bool:
    """Whether the state holds a copy: where only adapters are trained, the model without them is the reference."""
    return config.has_reference and not (config.model.lora_rank and not config.optimizer.trainable_params)


def stored_dtype(config: Config, kind: str) -> jnp.dtype:
    """In which a parameter of the reference of this kind is kept: that in which the model takes it, so nothing is lost.

    Products of 8-bit floats round the float32 parameter.
    """
    rounded = kind == 'matrix' and config.model.matmul_precision == 'fp8'
    return jnp.dtype(jnp.float32 if kind == 'vector' or rounded else config.model.dtype)


def to_reference(config: Config, params: Tree) -> Any:
    """A copy of parameters as they are kept."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: jnp.array(param, stored_dtype(config, kind_of(path)), copy=True), params
    )


def without_adapters(params: Tree) -> Any:
    """The parameters with adapters that add nothing."""
    return {
        key: without_adapters(value)
        if isinstance(value, Mapping)
        else jnp.zeros_like(value)
        if key == LORA_B
        else value
        for key, value in params.items()
    }
