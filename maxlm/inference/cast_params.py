"""Casts parameters to the computation dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import Config
from maxlm.parallel.host_offload import on_host
from maxlm.parallel.layout import SAVING, Layout
from maxlm.training.state import Params, abstract_model


def cast_params(params: Params, config: Config, layout: Layout, *, gather: bool = False) -> Params:
    """Casts parameters to the compute dtype and pads the vocabulary. Norm parameters stay float32.

    Args:
        params: parameters of a run. Quantized codes and arrays in host memory are returned unchanged.
        config: resolved config.
        layout: layout of the parameters.
        gather: gather parameters that are sharded to save memory. Valid only inside `jax.jit`.
    """
    # FP8 scales are computed from the float32 kernels.
    dtype = None if config.model.matmul_precision == 'fp8' else config.model.dtype
    variables = nnx.to_flat_state(nnx.state(abstract_model(config, layout)))
    axes_of = {tuple(path): variable.axes for path, variable in variables}

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        axes = axes_of[tuple(entry.key for entry in path)]
        if on_host(x) or 'norm' in axes:
            return x
        x = x.astype(dtype) if dtype is not None and x.dtype == jnp.float32 else x
        x = layout.pad_vocabulary(x, axes) if 'vocab' in axes else x
        gathered_axes = tuple('activation' if axis in SAVING else axis for axis in axes)
        return layout.constrain(x, gathered_axes) if gather else x

    return jax.tree_util.tree_map_with_path(cast, params)
