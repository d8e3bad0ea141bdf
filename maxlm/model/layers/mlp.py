"""The MLP (feed-forward layer) of a block.

Activations are GELU (Hendrycks & Gimpel 2016), SwiGLU (Shazeer 2020) and squared ReLU (So et al. 2021, "Primer").

Shapes: B batch, T length, D dim, F ffn_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import Initializer, Linear, fused_apply
from maxlm.model.layers.lora import adapter_of
from maxlm.parallel.partitioning import Partitioning


class FeedForward(nnx.Module):
    """Two projections, dim → ffn_dim → dim, with an activation in between; SwiGLU has a third projection."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        def linear(name: str, in_dim: int, out_dim: int, in_axis: str, out_axis: str, init: Initializer) -> Linear:
            return Linear(
                (in_dim,),
                (out_dim,),
                in_axes=(in_axis,),
                out_axes=(out_axis,),
                init=init,
                use_bias=bool(config.use_bias),
                matmul=config.matmul_precision,
                partitioning=partitioning,
                rngs=rngs,
                adapter=adapter_of(config, f'feedforward.{name}'),
            )

        init = initializers(config)
        into, back = (config.dim, config.ffn_dim, 'embed', 'ffn'), (config.ffn_dim, config.dim, 'ffn', 'embed')
        self.gate = linear('gate', *into, init.projection) if config.activation == 'swiglu' else None
        self.up = linear('up', *into, init.projection)
        self.down = linear('down', *back, init.residual)
        self.activation = config.activation
        self.partitioning = partitioning

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is not None:
            gate_BTF, up_BTF = fused_apply((self.gate, self.up), x_BTD)
            h_BTF = jax.nn.silu(gate_BTF) * up_BTF
            return self.down(self.partitioning.constrain(h_BTF, ('batch', 'length', 'ffn')))
        h_BTF = self.up(x_BTD)
        if self.activation == 'relu2':
            h_BTF = jnp.square(jax.nn.relu(h_BTF))
        else:
            h_BTF = jax.nn.gelu(h_BTF, approximate=self.activation == 'gelu_tanh')
        return self.down(self.partitioning.constrain(h_BTF, ('batch', 'length', 'ffn')))
