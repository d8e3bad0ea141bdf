"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.keys import ModelConfig
from maxlm.model.linear import parameter


class Norm(nnx.Module):
    """Normalizes the last axis; `model.norm` says how, `model.use_bias` whether LayerNorm shifts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.scale = parameter(rngs, (config.dim,), ('norm',), jax.nn.initializers.ones)
        has_bias = config.norm == 'layernorm' and config.use_bias
        self.bias = parameter(rngs, (config.dim,), ('norm',), jax.nn.initializers.zeros) if has_bias else None
        self.centered = config.norm == 'layernorm'
        self.epsilon = config.norm_epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        # Sums of squares lose too much in bfloat16, so the statistics are float32 whatever the type of the stream.
        y_BTD = x_BTD.astype(jnp.float32)
        if self.centered:
            y_BTD = y_BTD - y_BTD.mean(-1, keepdims=True)
        variance_BT1 = jnp.square(y_BTD).mean(-1, keepdims=True)
        y_BTD = y_BTD * jax.lax.rsqrt(variance_BT1 + self.epsilon) * self.scale[...]
        if self.bias is not None:
            y_BTD = y_BTD + self.bias[...]
        return y_BTD.astype(x_BTD.dtype)
