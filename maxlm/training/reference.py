"""The reference model: the teacher of distillation, or for DPO and GRPO a copy of the initial parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.model.layers.lora import LORA_B
from maxlm.model.parameters import kind_of
from maxlm.training.optimizers.trainable import Tree

FLOAT32 = jnp.dtype(jnp.float32)


def has_reference_params(config: Config) -> bool:
    """Returns True if the training state contains the parameters of a reference.

    Without a teacher, if a run trains only adapters, the reference is the model without its adapters.
    """
    if config.teacher is not None:
        return True
    return config.has_reference and not (config.model.lora_rank and not config.optimizer.trainable_params)


def reference_config(config: Config) -> Config:
    """Returns the config whose model is the reference of a resolved config's run."""
    return config if config.teacher is None else config.of_teacher


def stored_dtype(config: Config, kind: str, dtype: jnp.dtype = FLOAT32) -> jnp.dtype:
    """Returns the dtype in which a reference parameter of this kind, which has this dtype in training, is stored.

    It is the compute dtype of the model, so outputs are unchanged. FP8 matmuls quantize the float32 parameter. Codes
    and scales of quantized kernels keep their dtypes.
    """
    if kind == 'codes':
        return dtype
    rounded = kind == 'matrix' and config.model.matmul_precision == 'fp8'
    return jnp.dtype(jnp.float32 if kind == 'vector' or rounded else config.model.dtype)


def to_reference(config: Config, params: Tree) -> Any:
    """Returns a copy of the parameters in the dtypes given by `stored_dtype`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: jnp.array(param, stored_dtype(config, kind_of(path), param.dtype), copy=True), params
    )


def reference_of(config: Config, params: Tree, abstract: Tree | None) -> Any:
    """Returns parameters as the reference of a run, with the shardings of `abstract`; None if `abstract` is None."""
    if abstract is None:
        return None
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(partial(to_reference, reference_config(config)), out_shardings=shardings)(params)


def reference_params(config: Config, params: Tree, stored: Tree | None) -> Any:
    """Returns the parameters of the reference model, or None if the objective has no reference.

    Args:
        config: resolved config.
        params: current parameters.
        stored: `TrainState.reference`.
    """
    if config.teacher is None and not config.has_reference:
        return None
    return without_adapters(params) if stored is None else stored


def without_adapters(params: Tree) -> Any:
    """Returns the parameters with all `lora_b` matrices set to zero, which disables the adapters."""
    return {
        key: without_adapters(value)
        if isinstance(value, Mapping)
        else jnp.zeros_like(value)
        if key == LORA_B
        else value
        for key, value in params.items()
    }
