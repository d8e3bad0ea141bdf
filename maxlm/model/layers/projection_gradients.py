"""Backward passes of projections that XLA compiles to faster programs than those that JAX derives.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import jax


@jax.custom_vjp
def narrowing_matmul(x_MI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Returns x · kernel, [M, O], for a kernel with more inputs than outputs on a CPU.

    The kernel's gradient is computed as (gradientᵀ · x)ᵀ. With 512 inputs, 128 outputs and 768 rows, XLA's product with
    more columns than rows takes half the time of xᵀ · gradient.
    """
    return x_MI @ kernel_IO


def _narrowing_backward(residuals: tuple[jax.Array, jax.Array], gradient_MO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MI, kernel_IO = residuals
    of_kernel_OI = jax.lax.dot_general(gradient_MO, x_MI, (((0,), (0,)), ((), ())))
    # Without the barrier, XLA rewrites this as xᵀ · gradient.
    return gradient_MO @ kernel_IO.T, jax.lax.optimization_barrier(of_kernel_OI).T


narrowing_matmul.defvjp(lambda x_MI, kernel_IO: (x_MI @ kernel_IO, (x_MI, kernel_IO)), _narrowing_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """Returns x `num` times, and sums the gradients in the order in which JAX does.

    In each addition, the gradient of one projection is the first operand. cuBLAS then adds the second operand within
    the product. XLA does not look for a product in the second operand if the first one is a product with a sum.
    """
    return (x,) * num


def _fan_out_backward(num: int, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    total = gradients[-1]
    for gradient in gradients[-2::-1]:
        total = gradient + total
    return (total,)


fan_out.defvjp(lambda x, num: ((x,) * num, None), _fan_out_backward)
