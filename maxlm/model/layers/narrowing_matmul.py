"""Product with a kernel that has more inputs than outputs, on a CPU.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import jax


@jax.custom_vjp
def narrowing_matmul(x_MI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Returns x · kernel, [M, O], for a kernel with more inputs than outputs on a CPU.

    The kernel's gradient is computed as (gradientᵀ · x)ᵀ. With 512 inputs, 128 outputs and 768 rows, XLA's product with
    more columns than rows takes half the time of xᵀ · gradient.
    """
    return x_MI @ kernel_IO


def _backward(residuals: tuple[jax.Array, jax.Array], gradient_MO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MI, kernel_IO = residuals
    of_kernel_OI = jax.lax.dot_general(gradient_MO, x_MI, (((0,), (0,)), ((), ())))
    # Without the barrier, XLA rewrites this as xᵀ · gradient.
    return gradient_MO @ kernel_IO.T, jax.lax.optimization_barrier(of_kernel_OI).T


narrowing_matmul.defvjp(lambda x_MI, kernel_IO: (x_MI @ kernel_IO, (x_MI, kernel_IO)), _backward)
