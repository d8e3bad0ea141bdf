"""Projections: the one place where a matrix of the decoder is declared and applied."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[..., jax.Array]

# Places a value on the mesh by the names of its axes; the identity where there is no mesh.
Constrain = Callable[[jax.Array, tuple[str, ...]], jax.Array]


def unconstrained(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The `Constrain` of a model that runs without a mesh."""
    del axes
    return x


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    """A float32 parameter with its shape, initializer and logical axes.

    The axes travel with the parameter; `maxlm.training.sharding` maps them to the mesh.
    """
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """y = x · kernel + bias over one or more trailing axes, computed in x's type.

    The last `len(in_shape)` axes of x are contracted and replaced by `out_shape`.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        in_axes: tuple[str, ...],
        out_axes: tuple[str, ...],
        init: Initializer,
        use_bias: bool,
        rngs: nnx.Rngs,
    ):
        self.kernel = parameter(rngs, in_shape + out_shape, in_axes + out_axes, init)
        # A bias is small and read whole by every device: its axis is sharded only where the output's is.
        bias_axes = tuple('norm' if axis == 'embed' else axis for axis in out_axes)
        self.bias = parameter(rngs, out_shape, bias_axes, jax.nn.initializers.zeros) if use_bias else None
        self.num_in = len(in_shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(x.dtype)
        rows, out_shape = x.shape[: x.ndim - self.num_in], kernel.shape[self.num_in :]
        flat = math.prod(kernel.shape[: self.num_in])
        # As one product of two matrices: with more axes XLA transposes the output's gradient before it multiplies for
        # the kernel's, which took a quarter of the step of a small model on a CPU.
        y = (x.reshape(-1, flat) @ kernel.reshape(flat, -1)).reshape(*rows, *out_shape)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)
