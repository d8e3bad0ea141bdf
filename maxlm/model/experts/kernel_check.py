"""Comparison of the kernels for products of experts with the formula, on the device that will use them.

Shapes: R rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.model.experts.grouped_matmul import RowGroups, grouped_matmul

# Largest error, relative to the norm of the array. Results in bfloat16 have an error of 0.0017.
TOLERANCE = 0.01
# Sizes of the groups: aligned and unaligned starts, and groups without rows. UNUSED rows follow the last group.
SIZES = np.array([128, 75, 0, 138, 1, 109, 0, 40], np.int32)
UNUSED = 21


def check_expert_kernels(config: ModelConfig) -> None:
    """Compares the products of the config's widths and their gradients with the formula, which takes a few seconds.

    Third-party kernels for GPUs have computed wrong products on some devices for some widths.

    Raises:
        InputError: the products are wrong, or the package of the kernels is not installed.
    """
    if not config.num_experts or config.expert_matmul != 'tokamax':
        return
    rng = np.random.default_rng(0)
    rows = int(SIZES.sum()) + UNUSED
    dtype = jnp.dtype(config.dtype)
    for inputs, outputs in ((config.dim, config.expert_ffn_dim), (config.expert_ffn_dim, config.dim)):
        shapes = ((rows, inputs), (len(SIZES), inputs, outputs), (rows, outputs))
        x_RI, kernel_EIO, grad_RO = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
        errors = product_errors(config.expert_matmul, x_RI, kernel_EIO, SIZES, grad_RO)
        # The negated comparison also catches NaN.
        if not max(errors) <= TOLERANCE:
            device = jax.local_devices()[0].device_kind
            raise InputError(
                f'model.expert_matmul=tokamax: the kernels of tokamax {version("tokamax")} are off by '
                f'{max(errors):.2%} for matrices of {inputs} × {outputs} on {device}; install another version of '
                'tokamax, or set model.expert_matmul=ragged_dot, which needs much more memory and time on GPUs'
            )


def product_errors(
    kind: str, x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: np.ndarray, grad_RO: jax.Array
) -> list[float]:
    """Returns the errors of the product, of the gradient of the rows and of the gradient of the matrices."""
    is_used_R1 = (np.arange(len(x_RI)) < sizes_E.sum())[:, None]
    # Unused rows and their gradients must be 0.
    x_RI, grad_RO = (jnp.where(is_used_R1, array, 0) for array in (x_RI, grad_RO))
    y_RO, *gradients = products_with_gradients(kind, x_RI, kernel_EIO, jnp.asarray(sizes_E), grad_RO)
    found = (jnp.where(is_used_R1, y_RO, 0), *gradients)
    return relative_errors(found, exact_products(x_RI, kernel_EIO, sizes_E, grad_RO))


@partial(jax.jit, static_argnums=0)
def products_with_gradients(
    kind: str, x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array, grad_RO: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the product and the gradients of the rows and of the matrices."""
    y_RO, pull = jax.vjp(lambda x, kernel: grouped_matmul(x, kernel, RowGroups(sizes_E, 1), kind), x_RI, kernel_EIO)
    return y_RO, *pull(grad_RO)


def exact_products(
    x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: np.ndarray, grad_RO: jax.Array
) -> tuple[np.ndarray, ...]:
    """Computes the products of `product_errors` in float32 on the host."""
    x, kernel, grad = (np.asarray(array, np.float32) for array in (x_RI, kernel_EIO, grad_RO))
    y_RO, grad_RI, grad_EIO = (np.zeros_like(array) for array in (grad, x, kernel))
    ends = np.cumsum(sizes_E)
    for index, (start, end) in enumerate(zip(ends - sizes_E, ends, strict=True)):
        rows = slice(start, end)
        y_RO[rows] = x[rows] @ kernel[index]
        grad_RI[rows] = grad[rows] @ kernel[index].T
        grad_EIO[index] = x[rows].T @ grad[rows]
    return y_RO, grad_RI, grad_EIO


def relative_errors(found: Sequence[Any], expected: Sequence[np.ndarray]) -> list[float]:
    """Returns the norm of each difference relative to the norm of the expected array; NaN if not finite."""
    return [
        float(np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b))
        for a, b in zip(found, expected, strict=True)
    ]
