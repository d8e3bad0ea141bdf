"""The feed-forward half of a block: GELU (Hendrycks & Gimpel 2016), or SwiGLU (Shazeer 2020)."""

from __future__ import annotations

import math

import jax
from flax import nnx

from maxlm.config.keys import ModelConfig
from maxlm.model.linear import Constrain, Linear


class FeedForward(nnx.Module):
    """dim → ffn_dim → dim. Shapes: B batch, T length, D dim, F ffn_dim."""

    def __init__(self, config: ModelConfig, *, constrain: Constrain, rngs: nnx.Rngs):
        def linear(in_dim: int, out_dim: int, in_axis: str, out_axis: str, std: float) -> Linear:
            return Linear(
                (in_dim,),
                (out_dim,),
                in_axes=(in_axis,),
                out_axes=(out_axis,),
                std=std,
                use_bias=bool(config.use_bias),
                rngs=rngs,
            )

        std, residual_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        self.gate = linear(config.dim, config.ffn_dim, 'embed', 'ffn', std) if config.activation == 'swiglu' else None
        self.up = linear(config.dim, config.ffn_dim, 'embed', 'ffn', std)
        self.down = linear(config.ffn_dim, config.dim, 'ffn', 'embed', residual_std)
        self.approximate = config.activation == 'gelu_tanh'
        self.constrain = constrain

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = self.up(x_BTD)
        if self.gate is None:
            h_BTF = jax.nn.gelu(h_BTF, approximate=self.approximate)
        else:
            h_BTF = jax.nn.silu(self.gate(x_BTD)) * h_BTF
        return self.down(self.constrain(h_BTF, ('batch', 'length', 'ffn')))
