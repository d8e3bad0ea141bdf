"""Orthogonalization of matrices by Newton–Schulz iterations, and rescaling of the matrices before and after it.

Shapes: I inputs and O outputs of a matrix, M = min(I, O), W = max(I, O). Kernels are [I, O]; papers mostly write their
transposes, so their rows are the columns of a kernel. Leading axes number layers and experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Iteration(NamedTuple):
    """A method of orthogonalization.

    Attributes:
        coefficients: a, b and c of each step x ← a x + (b A + c A²) x with A = x xᵀ.
        margin: factor of the Frobenius norm by which the matrix is divided first.
        epsilon: added to the divisor.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    margin: float
    epsilon: float


ITERATIONS = 5
METHODS = {
    # The polynomial has the largest possible slope at 0, so small singular values grow fast. They end between about 0.7
    # and 1.2, which is accurate enough.
    'newton_schulz': Iteration(((3.4445, -4.7750, 2.0315),) * ITERATIONS, 1.0, 1e-7),
    # Amsel et al. 2025, "The Polar Express" (arXiv 2505.16932): the best polynomial of degree 5 for each step, here for
    # five steps, a safety factor of 1.02 and a cushion of 2.
    'polar_express': Iteration(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        1.01,
        1e-6,
    ),
}


def orthogonalize(x_IO: jax.Array, method: str = 'newton_schulz') -> jax.Array:
    """Maps matrices [..., I, O] of the form U S V to approximately U V in the dtype of x.

    Zero matrices remain zero.

    Args:
        x_IO: the matrices.
        method: `optimizer.muon_coefficients`.

    Examples:
        All singular values of the result are close to 1:

        >>> x_IO = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
        >>> orthogonalize(x_IO).round(2)
        Array([[0.71, 0.  , 0.  ],
               [0.  , 1.04, 0.  ]], dtype=float32)
    """
    iteration = METHODS[method]
    tall = x_IO.shape[-2] > x_IO.shape[-1]
    x_MW: jax.Array = x_IO.mT if tall else x_IO
    # The Frobenius norm bounds the largest singular value. It is computed in float32 because it sums many squares.
    norm_11 = jnp.linalg.norm(x_MW.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    if iteration.margin != 1:
        norm_11 = iteration.margin * norm_11
    x_MW = (x_MW / (norm_11 + iteration.epsilon)).astype(x_IO.dtype)
    for a, b, c in iteration.coefficients:
        gram_MM = x_MW @ x_MW.mT
        x_MW = a * x_MW + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MW
    return x_MW.mT if tall else x_MW


def equilibrate_rows(x_IO: jax.Array) -> jax.Array:
    """Scales the vector of each output to the same norm, ‖x‖ / √O; vectors of norm below 1e-6 remain smaller.

    MuonEq, arXiv 2603.28254. The spectrum that enters the iterations is then better conditioned.
    """
    x32_IO = x_IO.astype(jnp.float32)
    target_11 = jnp.linalg.norm(x32_IO, axis=(-2, -1), keepdims=True) * x_IO.shape[-1] ** -0.5
    norm_1O = jnp.linalg.norm(x32_IO, axis=-2, keepdims=True)
    scaled_IO: jax.Array = x32_IO * (target_11 / jnp.maximum(norm_1O, 1e-6))
    return scaled_IO.astype(x_IO.dtype)


def renormalize(x_IO: jax.Array) -> jax.Array:
    """Scales each matrix to the Frobenius norm √M of an orthogonal matrix. Muon+, arXiv 2602.21545."""
    x32_IO = x_IO.astype(jnp.float32)
    norm_11 = jnp.linalg.norm(x32_IO, axis=(-2, -1), keepdims=True)
    scaled_IO: jax.Array = x32_IO * (min(x_IO.shape[-2:]) ** 0.5 / jnp.maximum(norm_11, 1e-6))
    return scaled_IO.astype(x_IO.dtype)


def divide_by_second_moment(x_IO: jax.Array, moment_W: jax.Array, *, beta2: float) -> tuple[jax.Array, jax.Array]:
    """Divides the vectors of the outputs by the root of their second moment, without a change of the Frobenius norm.

    Li et al. 2025, "NorMuon" (arXiv 2510.05491). The second moment is the moving average of the mean square of the
    vector, from 0 and without bias correction. If there are fewer outputs than inputs, the vectors of the inputs are
    divided instead.

    Args:
        x_IO: orthogonalized matrices [..., I, O].
        moment_W: second moments [..., W] in float32.
        beta2: decay of the second moments.

    Returns:
        The matrices and the new second moments.
    """
    x32_IO = x_IO.astype(jnp.float32)
    by_input = x_IO.shape[-2] > x_IO.shape[-1]
    axis = -1 if by_input else -2
    mean_W = jnp.square(x32_IO).mean(axis=axis)
    moment_W = beta2 * moment_W + (1 - beta2) * mean_W
    scale_W = jax.lax.rsqrt(jnp.maximum(moment_W, 1e-10))
    before_1, after_1 = (square_W.sum(axis=-1, keepdims=True) for square_W in (mean_W, mean_W * scale_W**2))
    scale_W = scale_W * jnp.sqrt(before_1 / jnp.maximum(after_1, 1e-20))
    return (x32_IO * jnp.expand_dims(scale_W, axis)).astype(x_IO.dtype), moment_W
