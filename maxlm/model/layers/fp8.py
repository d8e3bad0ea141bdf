"""Matrix products in 8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

Inputs and kernels are rounded to e4m3 (3 bits behind the point, up to 448), gradients to e5m2 (2 bits, up to 57344).
Each array has one scale, from its largest element now: there is no history, and nothing to store. Scales are powers of
two. They cost less than one bit of the range and round nothing, neither here nor in the result, so it does not matter
where XLA multiplies by them: for an NVIDIA GPU it hands them to cuBLAS, or fuses them into a kernel of its own.

What a device without products of this type computes is the same, as products of a larger type, and slow.

Shapes: I inputs, O outputs; rows have any axes before those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# What a scale is called, for rules on what the backward pass keeps: it takes no memory, and to find it again means to
# read the array once more and to ask the other devices.
SCALE = 'fp8_scale'
# A smaller largest element counts as this one: 1 / scale would leave float32. Zeros have a scale too, then.
TINY = 2.0**-100
# Of a float32.
MANTISSA = 2**23 - 1


class Fp8Codes(NamedTuple):
    """An array in 8-bit floats: its values are those of the bits, times the scale."""

    # uint8. As floats, `jax.checkpoint` would round what it keeps to the range of IEEE's e4m3, which ends at 240; and
    # every library can send bytes.
    bits: jax.Array
    # float32, a power of two; NaN if an element is not finite.
    scale: jax.Array


def quantize(x: jax.Array, kind: Any) -> Fp8Codes:
    """An array rounded to E4M3 or E5M2, each element to the nearest.

    Elements below 2⁻¹⁷ (E4M3) or 2⁻³² (E5M2) of the largest may be lost. One that is not finite makes all of the result
    of a product NaN, so that a guard sees it.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = checkpoint_name(_scale(largest, float(jnp.finfo(kind).max)), SCALE)
    values = (x.astype(jnp.float32) * (1 / scale)).astype(kind)
    return Fp8Codes(jax.lax.bitcast_convert_type(values, jnp.uint8), scale)


@jax.custom_vjp
def product(x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes) -> jax.Array:
    """x · kernel in x's type, which is bfloat16 or float32; both products of the backward pass are in 8 bits as well.

    Args:
        x: [..., I].
        slot_IO: stands in for the kernel where gradients are wanted, in x's type; its values are not used.
        kernel_IO: in E4M3.

    Returns:
        [..., O].
    """
    return _forward(x, slot_IO, kernel_IO)[0]


def _forward(x: jax.Array, slot_IO: jax.Array, kernel_IO: Fp8Codes) -> tuple[jax.Array, tuple[Fp8Codes, Fp8Codes]]:
    del slot_IO
    codes = quantize(x, E4M3)
    # cuBLAS keeps fewer bits of the sum here, for speed, as is usual: the result is rounded to 3 bits soon enough.
    y = _multiply((codes, E4M3, [x.ndim - 1]), (kernel_IO, E4M3, [0]), x.dtype, jax.lax.Precision.DEFAULT)
    return y, (codes, kernel_IO)


def _backward(kept: tuple[Fp8Codes, Fp8Codes], gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel_IO = kept
    codes, kind, rows = quantize(gradient, E5M2), gradient.dtype, range(gradient.ndim - 1)
    # Of gradients, errors add up over the steps: sums in float32.
    x_gradient = _multiply((codes, E5M2, [len(rows)]), (kernel_IO, E4M3, [1]), kind, jax.lax.Precision.HIGHEST)
    gradient_IO = _multiply((x, E4M3, rows), (codes, E5M2, rows), kind, jax.lax.Precision.HIGHEST)
    return x_gradient, gradient_IO, None


product.defvjp(_forward, _backward)

Factor = tuple[Fp8Codes, Any, Sequence[int]]  # its type, and the axes that are contracted


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
    """The lowest power of two that, times `top`, reaches the largest element; NaN if that is not finite."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(largest, TINY) / top, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + MANTISSA) & ~jnp.uint32(MANTISSA), jnp.float32)
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)
