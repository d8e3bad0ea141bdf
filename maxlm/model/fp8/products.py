"""Matrix products in 8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

Inputs and kernels are rounded to e4m3 (3 mantissa bits, up to 448), gradients to e5m2 (2 mantissa bits, up to 57344).
Each array has one scale, a power of two. Such scales cost less than one bit of range and cause no rounding. XLA may
therefore multiply by them anywhere: on NVIDIA GPUs it passes them to cuBLAS or fuses them into its own kernel.

With current scaling, the scale follows from the largest element of the array, which is therefore read twice. With
delayed scaling, it follows from the largest elements of the last steps (`maxlm.training.fp8_history`). One kernel can
then round an array and find its largest element. Elements beyond the range become its limits.

Devices without FP8 products compute the same result slowly, as products of a larger type.

Shapes: I inputs, O outputs; inputs may have any leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# Name of the scales for rematerialization policies. Saving a scale takes no memory; recomputing it reads the array
# again and communicates between devices.
SCALE = 'fp8_scale'
# Lower bound of the largest element, because 1 / scale would otherwise exceed the float32 range. It also gives arrays
# of zeros a scale.
TINY = 2.0**-100
# Bits of the mantissa of a float32.
MANTISSA = 2**23 - 1
# Dtypes of a projection's arrays with delayed scaling, in the order of their scales: input, kernel and gradient of the
# output.
SCALED = (E4M3, E4M3, E5M2)


class Fp8Codes(NamedTuple):
    """An array in 8-bit floats. Its values are the values of the bits times the scale.

    Attributes:
        bits: the floats as uint8. `jax.checkpoint` would round saved floats to the range of IEEE's e4m3, which ends at
            240. In addition, every communication library supports bytes.
        scale: float32, a power of two; NaN if an element is not finite.
    """

    bits: jax.Array
    scale: jax.Array


class DelayedScaling(NamedTuple):
    """Input of a product with delayed scaling, and the scales of its projection.

    Attributes:
        codes: the input in E4M3.
        largest: largest absolute element of the input, float32.
        scales: float32 [3], in the order of `SCALED`. Its gradient contains the largest elements of the input and of
            the gradient of the output, and 0 for the kernel.
    """

    codes: Fp8Codes
    largest: jax.Array
    scales: jax.Array


def quantize(x: jax.Array, kind: Any, scale: jax.Array | None = None) -> Fp8Codes:
    """Rounds each element of an array to the nearest value of E4M3 or E5M2.

    Without `scale`, elements below 2⁻¹⁷ (E4M3) or 2⁻³² (E5M2) of the largest may become 0. One non-finite element makes
    every element of a product NaN, so the spike guard detects it.

    Args:
        x: the array.
        kind: E4M3 or E5M2.
        scale: power of two, for which larger elements become the largest value of `kind`; None: from the largest
            element.
    """
    top = float(jnp.finfo(kind).max)
    if scale is None:
        largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale = checkpoint_name(_scale(largest, top), SCALE)
        values = x.astype(jnp.float32) * (1 / scale)
    else:
        values = jnp.clip(x.astype(jnp.float32) * (1 / scale), -top, top)
    return Fp8Codes(jax.lax.bitcast_convert_type(values.astype(kind), jnp.uint8), scale)


def quantize_input(x: jax.Array, scales: jax.Array) -> DelayedScaling:
    """Returns an input x [..., I] of a projection in E4M3, with the scales of the projection, [3]."""
    scales_of_arrays = jax.lax.stop_gradient(scales)
    x = jax.lax.stop_gradient(x)
    return DelayedScaling(quantize(x, E4M3, scales_of_arrays[0]), _largest_element(x), scales)


def delayed_scales(largest: jax.Array) -> jax.Array:
    """Returns the scales of projections, [..., 3], from largest elements of earlier steps; 1 if an element is 0.

    Where no step has been recorded yet, all largest elements are 0.
    """
    tops = jnp.array([float(jnp.finfo(kind).max) for kind in SCALED])
    return jnp.where(largest > 0, _scale(largest, jnp.broadcast_to(tops, largest.shape)), 1.0)


@jax.custom_vjp
def product(x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes, delayed: DelayedScaling | None = None) -> jax.Array:
    """Returns x · kernel in the dtype of x, bfloat16 or float32. Both products of the backward pass also use FP8.

    Args:
        x: [..., I].
        slot_IO: array in the dtype of x that receives the gradient of the kernel; its values are not used.
        kernel_IO: the kernel in E4M3.
        delayed: x with delayed scaling, in place of the values of x; None: current scaling.

    Returns:
        [..., O].
    """
    return _forward(x, slot_IO, kernel_IO, delayed)[0]


def _forward(
    x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes, delayed: DelayedScaling | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    del slot_IO
    codes = quantize(x, E4M3) if delayed is None else delayed.codes
    # For speed, cuBLAS accumulates with fewer bits here. This is the usual choice, because inputs have only 3 bits.
    y = multiply(Rounded(codes, E4M3, [x.ndim - 1]), Rounded(kernel_IO, E4M3, [0]), x.dtype, jax.lax.Precision.DEFAULT)
    return y, (codes, kernel_IO, None if delayed is None else (delayed.largest, delayed.scales))


def _backward(kept: tuple[Any, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, None, Any]:
    x, kernel_IO, recorded = kept
    kind, rows, maxima = gradient.dtype, range(gradient.ndim - 1), None
    if recorded is None:
        codes = quantize(gradient, E5M2)
    else:
        largest, scales = recorded
        codes = quantize(gradient, E5M2, scales[2])
        # None stands for the gradients of codes and of the largest element, which have none.
        no_gradient: Any = None
        of_scales = jnp.stack([largest, jnp.zeros(()), _largest_element(gradient)])
        maxima = DelayedScaling(no_gradient, no_gradient, of_scales)
    # Errors of gradients accumulate over the steps, so their sums use float32.
    precision = jax.lax.Precision.HIGHEST
    x_gradient = multiply(Rounded(codes, E5M2, [len(rows)]), Rounded(kernel_IO, E4M3, [1]), kind, precision)
    gradient_IO = multiply(Rounded(x, E4M3, rows), Rounded(codes, E5M2, rows), kind, precision)
    return x_gradient, gradient_IO, None, maxima


product.defvjp(_forward, _backward)


class Rounded(NamedTuple):
    """A factor of a product.

    Attributes:
        codes: the array.
        kind: its dtype, E4M3 or E5M2.
        axes: its contracted axes.
    """

    codes: Fp8Codes
    kind: Any
    axes: Sequence[int]


def multiply(a: Rounded, b: Rounded, dtype: Any, precision: jax.lax.Precision, *, batch_axes: int = 0) -> jax.Array:
    """Returns the product of two arrays in FP8, as `jax.lax.dot_general` does, with leading batch axes."""
    batch = tuple(range(batch_axes))
    y = jax.lax.dot_general(
        jax.lax.bitcast_convert_type(a.codes.bits, a.kind),
        jax.lax.bitcast_convert_type(b.codes.bits, b.kind),
        ((tuple(a.axes), tuple(b.axes)), (batch, batch)),
        precision=precision,
        preferred_element_type=dtype,
    )
    return y * (a.codes.scale * b.codes.scale).astype(dtype)


def _largest_element(x: jax.Array) -> jax.Array:
    """Returns the largest absolute element, float32, which rematerialization saves."""
    # XLA can find the maxima of rows in the kernel that computes or rounds the rows, but not the maximum of all.
    # Without the barrier, it would merge both.
    rows = jax.lax.optimization_barrier(jnp.max(jnp.abs(x), axis=-1))
    return checkpoint_name(jnp.max(rows).astype(jnp.float32), SCALE)


def _scale(largest: jax.Array, top: float | jax.Array) -> jax.Array:
    """Returns the lowest power of two p with p · top ≥ largest; NaN if `largest` is not finite."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, TINY) / top, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + MANTISSA) & ~jnp.uint32(MANTISSA), jnp.float32)
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)
