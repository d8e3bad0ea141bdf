"""Matrix products in 8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

Inputs and kernels are rounded to e4m3 (3 mantissa bits, up to 448), gradients to e5m2 (2 mantissa bits, up to 57344).
Each array has one scale, computed from its current largest element, so no history is stored. Scales are powers of two.
They cost less than one bit of range and cause no rounding. XLA may therefore multiply by them anywhere: on NVIDIA GPUs
it passes them to cuBLAS or fuses them into its own kernel.

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


class Fp8Codes(NamedTuple):
    """An array in 8-bit floats. Its values are the values of the bits times the scale.

    Attributes:
        bits: the floats as uint8. `jax.checkpoint` would round saved floats to the range of IEEE's e4m3, which ends at
            240. In addition, every communication library supports bytes.
        scale: float32, a power of two; NaN if an element is not finite.
    """

    bits: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, kind: Any) -> Fp8Codes:
    """Rounds each element of an array to the nearest value of E4M3 or E5M2.

    Elements below 2⁻¹⁷ (E4M3) or 2⁻³² (E5M2) of the largest may become 0. One non-finite element makes every element of
    a product NaN, so the spike guard detects it.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = checkpoint_name(_scale(largest, float(jnp.finfo(kind).max)), SCALE)
    values = (x.astype(jnp.float32) * (1 / scale)).astype(kind)
    return Fp8Codes(jax.lax.bitcast_convert_type(values, jnp.uint8), scale)


@jax.custom_vjp
def product(x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes) -> jax.Array:
    """Returns x · kernel in the dtype of x, bfloat16 or float32. Both products of the backward pass also use FP8.

    Args:
        x: [..., I].
        slot_IO: array in the dtype of x that receives the gradient of the kernel; its values are not used.
        kernel_IO: the kernel in E4M3.

    Returns:
        [..., O].
    """
    return _forward(x, slot_IO, kernel_IO)[0]


def _forward(x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes) -> tuple[jax.Array, tuple[Fp8Codes, Fp8Codes]]:
    del slot_IO
    codes = quantize(x, E4M3)
    # For speed, cuBLAS accumulates with fewer bits here. This is the usual choice, because inputs have only 3 bits.
    y = _multiply((codes, E4M3, [x.ndim - 1]), (kernel_IO, E4M3, [0]), x.dtype, jax.lax.Precision.DEFAULT)
    return y, (codes, kernel_IO)


def _backward(kept: tuple[Fp8Codes, Fp8Codes], gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel_IO = kept
    codes, kind, rows = quantize(gradient, E5M2), gradient.dtype, range(gradient.ndim - 1)
    # Errors of gradients accumulate over the steps, so their sums use float32.
    x_gradient = _multiply((codes, E5M2, [len(rows)]), (kernel_IO, E4M3, [1]), kind, jax.lax.Precision.HIGHEST)
    gradient_IO = _multiply((x, E4M3, rows), (codes, E5M2, rows), kind, jax.lax.Precision.HIGHEST)
    return x_gradient, gradient_IO, None


product.defvjp(_forward, _backward)

Factor = tuple[Fp8Codes, Any, Sequence[int]]  # codes, dtype and contracted axes


def _multiply(a: Factor, b: Factor, kind: Any, precision: jax.lax.Precision) -> jax.Array:
    (a_codes, a_kind, a_axes), (b_codes, b_kind, b_axes) = a, b
    y = jax.lax.dot_general(
        jax.lax.bitcast_convert_type(a_codes.bits, a_kind),
        jax.lax.bitcast_convert_type(b_codes.bits, b_kind),
        ((tuple(a_axes), tuple(b_axes)), ((), ())),
        precision=precision,
        preferred_element_type=kind,
    )
    return y * (a_codes.scale * b_codes.scale).astype(kind)


def _scale(largest: jax.Array, top: float) -> jax.Array:
    """Returns the lowest power of two p with p · top ≥ largest; NaN if `largest` is not finite."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, TINY) / top, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + MANTISSA) & ~jnp.uint32(MANTISSA), jnp.float32)
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)
