"""Products in 8-bit floats with delayed scaling, whose arrays one GPU kernel rounds.

The values are those of `maxlm.model.fp8.products.product`. In contrast, the kernel also writes the transposed copies that
cuBLAS needs, finds the largest elements, and sums the gradient of a bias.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.fp8.rounding_kernel import RoundedMatrix, Rounding, round_matrices
from maxlm.model.fp8.products import E4M3, E5M2, Fp8Codes, Rounded, multiply
from maxlm.parallel.partitioning import Partitioning


class Projection(NamedTuple):
    """Arrays of a projection.

    Attributes:
        slot: array [I, O] in the dtype of the input that receives the gradient of the kernel; its values are not used.
        bias: bias [O] in the dtype of the input; None without one.
        kernel: the kernel [I, O] in E4M3.
        scales: float32 [3]; see `maxlm.model.fp8.products.DelayedScaling.scales`.
    """

    slot: jax.Array
    bias: jax.Array | None
    kernel: Fp8Codes
    scales: jax.Array


class RoundedInput(NamedTuple):
    """Input of projections, rounded with the scale of the first one.

    Attributes:
        codes: the input in E4M3, [R, I].
        transposed: the bits of the transposed input, uint8 [I, R].
        largest: largest absolute element, float32.
    """

    codes: Fp8Codes
    transposed: jax.Array
    largest: jax.Array


def round_input(x_RI: jax.Array, scales: jax.Array, partitioning: Partitioning) -> RoundedInput:
    """Returns an input of projections in E4M3."""
    x_RI, scale = jax.lax.stop_gradient((x_RI, scales[0]))
    (found,) = round_matrices([x_RI], [scale], [Rounding(E4M3)], partitioning)
    return RoundedInput(*found[:3])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x_RI: jax.Array, projection: Projection, rounded: RoundedInput, partitioning: Partitioning) -> jax.Array:
    """Returns x · kernel + bias, [R, O], in the dtype of x.

    Args:
        x_RI: the input, which receives the gradient; its values are not used.
        projection: arrays of the projection.
        rounded: the input in 8-bit floats.
        partitioning: partitioning of the model.
    """
    return _forward(x_RI, projection, rounded, partitioning)[0]


def _forward(
    x_RI: jax.Array, projection: Projection, rounded: RoundedInput, partitioning: Partitioning
) -> tuple[jax.Array, Any]:
    del partitioning
    y_RO = apply(projection, rounded.codes, x_RI.dtype)
    has_bias = None if projection.bias is None else ()
    kept = RoundedInput(Fp8Codes(None, rounded.codes.scale), rounded.transposed, rounded.largest)
    return y_RO, (kept, projection.kernel, projection.scales, has_bias)


def _backward(partitioning: Partitioning, residuals: Any, gradient_RO: jax.Array) -> tuple[jax.Array, Any, None]:
    rounded, kernel, scales, has_bias = residuals
    (found,) = round_matrices([gradient_RO], [scales[2]], [Rounding(E5M2, has_sums=has_bias is not None)], partitioning)
    x_gradient_RI, of_projection = gradients_of(found, kernel, rounded, gradient_RO.dtype)
    return x_gradient_RI, of_projection, None


product.defvjp(_forward, _backward)


def apply(projection: Projection, codes: Fp8Codes, dtype: Any) -> jax.Array:
    """Returns the product of an input in E4M3 with the kernel, plus the bias."""
    # For speed, cuBLAS accumulates with fewer bits here, as in `maxlm.model.fp8.products`.
    y_RO = multiply(Rounded(codes, E4M3, [1]), Rounded(projection.kernel, E4M3, [0]), dtype, jax.lax.Precision.DEFAULT)
    return y_RO if projection.bias is None else y_RO + projection.bias[None]


def gradients_of(
    gradient: RoundedMatrix, kernel: Fp8Codes, rounded: RoundedInput, dtype: Any
) -> tuple[jax.Array, Projection]:
    """Returns the gradients of the input and of a projection.

    Args:
        gradient: gradient of the output in E5M2, [R, O], with the sums of its columns if the projection has a bias.
        kernel: the kernel in E4M3.
        rounded: the input, of whose codes only the scale is used.
        dtype: dtype of the gradients.
    """
    precision = jax.lax.Precision.HIGHEST
    x_gradient_RI = multiply(Rounded(gradient.codes, E5M2, [1]), Rounded(kernel, E4M3, [1]), dtype, precision)
    x_IR = Fp8Codes(rounded.transposed, rounded.codes.scale)
    gradient_OR = Fp8Codes(gradient.transposed, gradient.codes.scale)
    of_kernel_IO = multiply(Rounded(x_IR, E4M3, [1]), Rounded(gradient_OR, E5M2, [1]), dtype, precision)
    of_scales = jnp.stack([rounded.largest, jnp.zeros(()), gradient.largest])
    of_bias_O = None if gradient.sums is None else gradient.sums.astype(dtype)
    # None stands for the codes of the kernel, which have no gradient.
    no_gradient: Any = None
    return x_gradient_RI, Projection(of_kernel_IO, of_bias_O, no_gradient, of_scales)
