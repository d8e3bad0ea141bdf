"""The MLP (feed-forward layer) of a block.

Activations are ReLU, SiLU, GELU (Hendrycks & Gimpel 2016), their gated forms ReGLU, SwiGLU and GEGLU (Shazeer 2020),
and squared ReLU (So et al. 2021, "Primer").

Shapes: B batch, T length, D dim, F ffn_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.fp8.kernel_feed_forward import UNSUPPORTED, FeedForwardPlan, feed_forward
from maxlm.model.fp8.kernel_products import RoundedInput
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import Initializer, Linear, fused_apply
from maxlm.model.layers.lora import adapter_of
from maxlm.parallel.partitioning import Partitioning

# Largest gate, and largest absolute value of the other input, of `swiglu_oai`.
SWIGLU_LIMIT = 7.0


class FeedForward(nnx.Module):
    """Two projections, dim → ffn_dim → dim, with an activation in between; gated ones have a third projection."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs, name: str = 'feedforward'):
        def linear(part: str, in_dim: int, out_dim: int, in_axis: str, out_axis: str, init: Initializer) -> Linear:
            return Linear(
                (in_dim,),
                (out_dim,),
                in_axes=(in_axis,),
                out_axes=(out_axis,),
                init=init,
                use_bias=config.has_bias('mlp'),
                matmul=config.matmul_precision,
                partitioning=partitioning,
                rngs=rngs,
                adapter=adapter_of(config, f'{name}.{part}'),
            )

        init = initializers(config)
        into, back = (config.dim, config.ffn_dim, 'embed', 'ffn'), (config.ffn_dim, config.dim, 'ffn', 'embed')
        self.gate = linear('gate', *into, init.feedforward) if config.activation in GATED_ACTIVATIONS else None
        self.up = linear('up', *into, init.feedforward)
        self.down = linear('down', *back, init.residual)
        self.plan = FeedForwardPlan(ACTIVATIONS[config.activation], partitioning)
        self.is_compiled_by_triton = config.activation not in UNSUPPORTED
        self.activation = recomputed(ACTIVATIONS[config.activation], in_loop=config.scan_layers)
        self.partitioning = partitioning
        self.is_fp8 = config.matmul_precision == 'fp8'

    @property
    def fused_projections(self) -> tuple[str, ...]:
        """Names of the projections of the same input."""
        return ('gate', 'up')

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.up.has_fp8_kernels and self.is_compiled_by_triton:
            return self._run_kernels(x_BTD)
        inputs = [self.up(x_BTD)] if self.gate is None else fused_apply((self.gate, self.up), x_BTD)
        if self.is_fp8:
            # XLA for GPUs would compute GELU within the product and return its input too, which fails for 8-bit floats.
            inputs = jax.lax.optimization_barrier(inputs)
        with jax.named_scope('activation'):
            h_BTF = self.activation(*inputs)
        return self.down(self.partitioning.constrain(h_BTF, ('batch', 'length', 'ffn')))

    def _run_kernels(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the output with `model.fp8_kernel=pallas`."""
        x_RD = x_BTD.reshape(-1, x_BTD.shape[-1])
        into = [self.up] if self.gate is None else [self.gate, self.up]
        rounded = into[0].quantized_input(x_BTD)
        assert isinstance(rounded, RoundedInput)
        projections = [linear.fp8_projection(x_BTD.dtype) for linear in into]
        y_RD = feed_forward(x_RD, projections, self.down.fp8_projection(x_BTD.dtype), rounded, self.plan)
        return y_RD.reshape(x_BTD.shape)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) · up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


def swiglu_oai(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gate · sigmoid(1.702 · gate) · (up + 1) of clamped inputs (OpenAI 2025, gpt-oss, reference code)."""
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def geglu(gate: jax.Array, up: jax.Array, *, approximate: bool = False) -> jax.Array:
    """Returns gelu(gate) · up (Shazeer 2020), optionally with the tanh approximation of GELU."""
    return jax.nn.gelu(gate, approximate=approximate) * up


def reglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns max(gate, 0) · up (Shazeer 2020)."""
    return jax.nn.relu(gate) * up


def squared_relu(x: jax.Array) -> jax.Array:
    """Returns max(x, 0)² (So et al. 2021, "Primer")."""
    return jnp.square(jax.nn.relu(x))


# Values of model.activation. GATED_ACTIVATIONS take the outputs of two projections.
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    'gelu': partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': partial(jax.nn.gelu, approximate=True),
    'relu': jax.nn.relu,
    'relu2': squared_relu,
    'silu': jax.nn.silu,
    'swiglu': swiglu,
    'swiglu_oai': swiglu_oai,
    'geglu': geglu,
    'geglu_tanh': partial(geglu, approximate=True),
    'reglu': reglu,
}


def recomputed(function: Callable[..., jax.Array], *, in_loop: bool) -> Callable[..., jax.Array]:
    """Returns an elementwise function whose backward pass keeps only its inputs and computes in float32.

    The backward pass that JAX derives keeps several intermediate arrays of the size of the input.

    Args:
        function: elementwise function of one or more arrays of equal shape and dtype.
        in_loop: see `maxlm.model.layers.norm.NormKind`.
    """
    wrapped = jax.custom_vjp(function)

    def forward(*inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*inputs), inputs

    def backward(inputs: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
        if not in_loop:
            inputs, gradient = jax.lax.optimization_barrier((inputs, gradient))
        _, pull_back = jax.vjp(function, *(x.astype(jnp.float32) for x in inputs))
        return tuple(g.astype(gradient.dtype) for g in pull_back(gradient.astype(jnp.float32)))

    wrapped.defvjp(forward, backward)
    return wrapped
