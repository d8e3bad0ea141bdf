"""Products in 8-bit floats with delayed scaling, whose arrays one GPU kernel rounds.

The values are those of `maxlm.model.fp8.products.product`. In contrast, the kernel also writes the transposed copies
that cuBLAS needs, finds the largest elements, and sums the gradient of a bias.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.fp8.products import E4M3, E5M2, Fp8Codes, Rounded, multiply
from maxlm.model.fp8.rounding_kernel import Fp8Rounding, RoundedMatrix, round_matrices
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


class KeptProjection(NamedTuple):
    """Arrays of a projection that the backward pass needs.

    Attributes:
        kernel, scales: see `Projection`.
        bias: empty tuple in place of the bias, because residuals must be arrays; None without one.
    """

    kernel: Fp8Codes
    scales: jax.Array
    bias: tuple[()] | None

    @property
    def rounding(self) -> Fp8Rounding:
        """Returns the rounding of the gradient of the output."""
        return Fp8Rounding(E5M2, has_sums=self.bias is not None)


class KeptInput(NamedTuple):
    """Arrays of an input that the backward pass needs.

    Attributes:
        transposed: the transposed input in E4M3, [I, R].
        largest: largest absolute element, float32.
    """

    transposed: Fp8Codes
    largest: jax.Array


class RoundedInput(NamedTuple):
    """Input of projections, rounded with the scale of the first one.

    Attributes:
        codes: the input in E4M3, [R, I].
        kept: arrays for the backward pass.
    """

    codes: Fp8Codes
    kept: KeptInput


def round_input(x_RI: jax.Array, scales: jax.Array, partitioning: Partitioning) -> RoundedInput:
    """Returns an input of projections in E4M3."""
    x_RI, scale = jax.lax.stop_gradient((x_RI, scales[0]))
    (found,) = round_matrices([x_RI], [scale], [Fp8Rounding(E4M3)], partitioning)
    return rounded_input(found)


def rounded_input(matrix: RoundedMatrix) -> RoundedInput:
    """Returns a matrix in E4M3 as an input of projections."""
    return RoundedInput(matrix.codes, KeptInput(matrix.transposed, matrix.largest))


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
    return apply(projection, rounded.codes, x_RI.dtype), (rounded.kept, keep(projection))


def _backward(
    partitioning: Partitioning, residuals: tuple[KeptInput, KeptProjection], gradient_RO: jax.Array
) -> tuple[jax.Array, Any, None]:
    kept, projection = residuals
    (found,) = round_matrices([gradient_RO], [projection.scales[2]], [projection.rounding], partitioning)
    x_gradient_RI, of_projection = gradients_of(found, projection, kept, gradient_RO.dtype)
    return x_gradient_RI, of_projection, None


product.defvjp(_forward, _backward)


def apply(projection: Projection, codes: Fp8Codes, dtype: Any) -> jax.Array:
    """Returns the product of an input in E4M3 with the kernel, plus the bias."""
    # For speed, cuBLAS accumulates with fewer bits here, as in `maxlm.model.fp8.products`.
    y_RO = multiply(Rounded(codes, E4M3, [1]), Rounded(projection.kernel, E4M3, [0]), dtype, jax.lax.Precision.DEFAULT)
    return y_RO if projection.bias is None else y_RO + projection.bias[None]


def keep(projection: Projection) -> KeptProjection:
    """Returns the arrays of a projection that the backward pass needs."""
    return KeptProjection(projection.kernel, projection.scales, None if projection.bias is None else ())


def gradients_of(
    gradient: RoundedMatrix, projection: KeptProjection, kept: KeptInput, dtype: Any
) -> tuple[jax.Array, Projection]:
    """Returns the gradients of the input and of a projection in `dtype`.

    Args:
        gradient: gradient of the output in E5M2, [R, O], with the sums of its columns if the projection has a bias.
        projection: arrays of the projection.
        kept: arrays of the input.
        dtype: dtype of the gradients.
    """
    precision = jax.lax.Precision.HIGHEST
    kernel_IO = Rounded(projection.kernel, E4M3, [1])
    x_gradient_RI = multiply(Rounded(gradient.codes, E5M2, [1]), kernel_IO, dtype, precision)
    gradient_OR = Rounded(gradient.transposed, E5M2, [1])
    of_kernel_IO = multiply(Rounded(kept.transposed, E4M3, [1]), gradient_OR, dtype, precision)
    of_scales = jnp.stack([kept.largest, jnp.zeros(()), gradient.largest])
    of_bias_O = None if gradient.sums is None else gradient.sums.astype(dtype)
    # None stands for the codes of the kernel, which have no gradient.
    no_gradient: Any = None
    return x_gradient_RI, Projection(of_kernel_IO, of_bias_O, no_gradient, of_scales)
