"""Projections: the one place where a matrix of the decoder is declared and applied."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.model.placement import Placement

Initializer = Callable[..., jax.Array]


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
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.axes = in_axes + out_axes
        self.kernel = parameter(rngs, in_shape + out_shape, self.axes, init)
        # A bias is small and read whole by every device: its axis is sharded only where the output's is.
        bias_axes = tuple('norm' if axis == 'embed' else axis for axis in out_axes)
        self.bias = parameter(rngs, out_shape, bias_axes, jax.nn.initializers.zeros) if use_bias else None
        self.num_in = len(in_shape)
        self.placement = placement

    def __call__(self, x: jax.Array) -> jax.Array:
        # In the type of the computation before it travels: half the bytes.
        kernel = self.placement.gathered(self.kernel[...].astype(x.dtype), self.axes)
        rows, out_shape = x.shape[: x.ndim - self.num_in], kernel.shape[self.num_in :]
        if self.placement.parts('length') == 1:
            # As one product of two matrices: with more axes XLA transposes the output's gradient before it multiplies
            # for the kernel's, which took a quarter of the step of a small model on a CPU.
            flat = math.prod(kernel.shape[: self.num_in])
            y = (x.reshape(-1, flat) @ kernel.reshape(flat, -1)).reshape(*rows, *out_shape)
        else:
            # One axis cannot be split over the devices of both batch and length.
            y = jnp.tensordot(x, kernel, axes=self.num_in)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)
