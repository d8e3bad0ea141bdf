"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019), computed in float32.

The backward pass is written by hand. It keeps the input in its own dtype and two float32 numbers per row. The backward
pass that JAX derives keeps several float32 arrays of the size of the input.

Shapes: R rows (any number of axes), D normalized axis, 1 a broadcast axis.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.linear import parameter
from maxlm.model.layers.norm_kernels import FusedNorm, add_and_normalize
from maxlm.parallel.partitioning import Partitioning


class NormKind(NamedTuple):
    """Static properties of a normalization.

    Attributes:
        is_centered: True subtracts the mean (LayerNorm).
        epsilon: constant added to the mean square.
        in_loop: True if the layer is in a loop over layers, which keeps the compiler from merging the recomputation of
            the backward pass with the forward pass.
    """

    is_centered: bool
    epsilon: float
    in_loop: bool = True


class Norm(nnx.Module):
    """Normalizes the last axis.

    `model.norm` selects LayerNorm or RMSNorm; `model.norm_use_scale` and `model.has_bias` select the parameters.
    With `model.norm_unit_offset`, the input is multiplied by 1 + scale.

    Args:
        config: config of the model.
        dim: size of the last axis.
        rngs: random keys.
        partitioning: partitioning of the input, a residual stream, for `model.norm_kernel`; None: XLA normalizes.
    """

    def __init__(self, config: ModelConfig, dim: int, *, rngs: nnx.Rngs, partitioning: Partitioning | None = None):
        ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
        has_bias = config.norm == 'layernorm' and config.has_bias('norm') and config.norm_use_scale
        self.scale_offset = 1.0 if config.norm_unit_offset else 0.0
        initial_scale = zeros if config.norm_unit_offset else ones
        self.scale = parameter(rngs, (dim,), ('norm',), initial_scale) if config.norm_use_scale else None
        self.bias = parameter(rngs, (dim,), ('norm',), zeros) if has_bias else None
        self.kind = NormKind(config.norm == 'layernorm', config.norm_epsilon, config.scan_layers)
        self.partitioning = partitioning if config.norm_kernel == 'pallas' else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.partitioning is not None:
            return self._run_kernel(x, None, None, returns_sum=False)[1]
        with jax.named_scope('norm'):
            return normalize(x, *self._parameters(), self.kind)

    def add_and_normalize(
        self, stream: jax.Array, branch: jax.Array | None, branch_bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns stream + branch, and this sum normalized; without a branch, the stream and the normalized stream.

        A caller that uses the sum afterwards should use the returned one: a kernel then adds its gradient. It also
        computes the gradient of `branch_bias`, which the branch contains without a gradient.
        """
        if self.partitioning is not None:
            return self._run_kernel(stream, branch, branch_bias, returns_sum=True)
        assert branch_bias is None, 'only the kernels compute the gradient of the bias'
        stream = stream if branch is None else stream + branch
        return stream, self(stream)

    def _run_kernel(
        self, stream: jax.Array, branch: jax.Array | None, branch_bias: jax.Array | None, *, returns_sum: bool
    ) -> tuple[Any, jax.Array]:
        assert self.partitioning is not None
        norm = FusedNorm(self.kind.is_centered, self.kind.epsilon, returns_sum, self.partitioning)
        with jax.named_scope('norm'):
            return add_and_normalize(stream, branch, *self._parameters(), branch_bias, norm)

    def _parameters(self) -> tuple[jax.Array | None, jax.Array | None]:
        scale, bias = (None if param is None else param[...] for param in (self.scale, self.bias))
        return scale + self.scale_offset if scale is not None and self.scale_offset else scale, bias


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalize(x_RD: jax.Array, scale_D: jax.Array | None, bias_D: jax.Array | None, kind: NormKind) -> jax.Array:
    """Returns (x - mean) · scale / sqrt(mean((x - mean)²) + epsilon) + bias in the dtype of x.

    Args:
        x_RD: input with any number of leading axes.
        scale_D: factors, float32; None means 1.
        bias_D: summands, float32; None means 0.
        kind: properties of the normalization. Without centering, the mean is taken to be 0.
    """
    return _forward(x_RD, scale_D, bias_D, kind)[0]


def _forward(x_RD: jax.Array, scale_D: jax.Array | None, bias_D: jax.Array | None, kind: NormKind) -> tuple:
    # Sums of squares lose too much precision in bfloat16, so the statistics are always float32.
    y_RD, mean_R1 = x_RD.astype(jnp.float32), None
    if kind.is_centered:
        mean_R1 = y_RD.mean(-1, keepdims=True)
        y_RD = y_RD - mean_R1
    inverse_R1 = jax.lax.rsqrt(jnp.square(y_RD).mean(-1, keepdims=True) + kind.epsilon)
    y_RD = y_RD * inverse_R1
    if scale_D is not None:
        y_RD = y_RD * _as_row(scale_D, x_RD)
    if bias_D is not None:
        y_RD = y_RD + _as_row(bias_D, x_RD)
    return y_RD.astype(x_RD.dtype), (x_RD, mean_R1, inverse_R1, scale_D, bias_D)


def _backward(kind: NormKind, residuals: Any, gradient_RD: jax.Array) -> tuple[jax.Array, Any, Any]:
    x_RD, mean_R1, inverse_R1, scale_D, bias_D = residuals
    if not kind.in_loop:
        # Otherwise the compiler would store the normalized input in float32 instead of recomputing it.
        x_RD, gradient_RD = jax.lax.optimization_barrier((x_RD, gradient_RD))
    rows = tuple(range(x_RD.ndim - 1))
    g_RD = gradient_RD.astype(jnp.float32)
    normed_RD = x_RD.astype(jnp.float32)
    normed_RD = (normed_RD if mean_R1 is None else normed_RD - mean_R1) * inverse_R1
    of_bias_D = None if bias_D is None else g_RD.sum(rows)
    of_scale_D = None if scale_D is None else (g_RD * normed_RD).sum(rows)
    if scale_D is not None:
        g_RD = g_RD * _as_row(scale_D, x_RD)
    of_x_RD = g_RD - normed_RD * (g_RD * normed_RD).mean(-1, keepdims=True)
    if kind.is_centered:
        of_x_RD = of_x_RD - g_RD.mean(-1, keepdims=True)
    return (of_x_RD * inverse_R1).astype(x_RD.dtype), of_scale_D, of_bias_D


normalize.defvjp(_forward, _backward)


def _as_row(vector_D: jax.Array, x_RD: jax.Array) -> jax.Array:
    return jnp.expand_dims(vector_D, range(x_RD.ndim - 1))
