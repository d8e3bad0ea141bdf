"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.linear import parameter


class Norm(nnx.Module):
    """Normalizes the last axis.

    `model.norm` selects LayerNorm or RMSNorm; `model.norm_use_scale` and `model.use_bias` select the parameters.
    """

    def __init__(self, config: ModelConfig, dim: int, *, rngs: nnx.Rngs):
        ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
        has_bias = config.norm == 'layernorm' and config.use_bias and config.norm_use_scale
        self.scale = parameter(rngs, (dim,), ('norm',), ones) if config.norm_use_scale else None
        self.bias = parameter(rngs, (dim,), ('norm',), zeros) if has_bias else None
        self.centered = config.norm == 'layernorm'
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        # Sums of squares lose too much precision in bfloat16, so the statistics are always float32.
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.epsilon)
        if self.scale is not None:
            y = y * jnp.expand_dims(self.scale[...], range(y.ndim - 1))
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], range(y.ndim - 1))
        return y.astype(x.dtype)
