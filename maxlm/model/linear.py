"""Projections: the one place where a matrix of the decoder is declared and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.model import fp8
from maxlm.model.placement import Placement

Initializer = Callable[..., jax.Array]


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> nnx.Param:
    """A float32 parameter with its shape, initializer and logical axes.

    The axes travel with the parameter; `maxlm.training.sharding` maps them to the mesh.
    """
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """y = x · kernel + bias over one or more trailing axes, in x's type; computed in that too, or as `matmul` says.

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
        matmul: str,
        placement: Placement,
        rngs: nnx.Rngs,
    ):
        self.axes = in_axes + out_axes
        self.kernel = parameter(rngs, in_shape + out_shape, self.axes, init)
        # A bias is small and read whole by every device: its axis is sharded only where the output's is.
        bias_axes = tuple('norm' if axis == 'embed' else axis for axis in out_axes)
        self.bias = parameter(rngs, out_shape, bias_axes, jax.nn.initializers.zeros) if use_bias else None
        self.num_in = len(in_shape)
        self.out_shape = out_shape
        self.placement = placement
        self.matmul = matmul

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.shape[: x.ndim - self.num_in]
        flat = math.prod(x.shape[x.ndim - self.num_in :])
        # As one product of two matrices: with more axes XLA transposes the output's gradient before it multiplies for
        # the kernel's, which took a quarter of the step of a small model on a CPU. But one axis cannot be split over
        # the devices of both batch and length.
        is_matrix = self.placement.parts('length') == 1
        kernel = self._gathered_kernel(x.dtype)
        if self.matmul == 'fp8':
            # The codes are what travels, a byte each: nothing but a gradient comes of `kernel`.
            codes = fp8.quantize(jax.lax.stop_gradient(self.kernel[...]), fp8.E4M3)
            codes = codes._replace(bits=self.placement.gathered(codes.bits, self.axes).reshape(flat, -1))
            y = fp8.product(x.reshape(*([-1] if is_matrix else rows), flat), kernel.reshape(flat, -1), codes)
        elif is_matrix:
            y = x.reshape(-1, flat) @ kernel.reshape(flat, -1)
        else:
            y = jnp.tensordot(x, kernel, axes=self.num_in)
        return self._with_bias(y.reshape(*rows, *self.out_shape))

    def _gathered_kernel(self, dtype: jnp.dtype) -> jax.Array:
        # In the type of the computation before it travels: half the bytes.
        return self.placement.gathered(self.kernel[...].astype(dtype), self.axes)

    def _with_bias(self, y: jax.Array) -> jax.Array:
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    @property
    def _is_whole(self) -> bool:
        """Whether a device has all of the kernel when it is used, and the product is one of two plain matrices."""
        split = any(self.placement.parts(axis) > 1 for axis in (*self.axes[self.num_in :], 'length'))
        return not split and self.matmul != 'fp8'


def apply_together(linears: Sequence[Linear], x: jax.Array) -> list[jax.Array]:
    """What several projections make of the last axis of x; as one product where nothing is split.

    One wide product is faster than several on a CPU, and so is its gradient. Compilers for other devices may do the
    same by themselves.
    """
    if not all(linear._is_whole for linear in linears):
        return [linear(x) for linear in linears]
    kernels = [linear._gathered_kernel(x.dtype).reshape(x.shape[-1], -1) for linear in linears]
    y = x.reshape(-1, x.shape[-1]) @ jnp.concatenate(kernels, axis=1)
    parts = jax.lax.split(y, [kernel.shape[1] for kernel in kernels], axis=1)
    return [
        linear._with_bias(part.reshape(*x.shape[:-1], *linear.out_shape))
        for linear, part in zip(linears, parts, strict=True)
    ]
