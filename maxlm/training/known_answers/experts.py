"""Known answers of the products of experts.

Shapes: R rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.hardware.identity import installed_version
from maxlm.model.experts.grouped_matmul import RowGroups, grouped_matmul
from maxlm.training.known_answers.answer import OTHER_VERSIONS, KnownAnswer, normal

# Largest error, relative to the norm of the array. Results in bfloat16 have an error of 0.0017.
TOLERANCE = 0.01
# Sizes of the groups: aligned and unaligned starts, and groups without rows. UNUSED rows follow the last group.
SIZES = np.array([128, 75, 0, 138, 1, 109, 0, 40], np.int32)
UNUSED = 21
NAMES = ('product', 'gradient of the rows', 'gradient of the kernels')


def experts_answer(model: ModelConfig, inputs: int, outputs: int) -> KnownAnswer:
    """Returns the products of groups of rows with the kernels of experts, and their gradients.

    Third-party kernels for GPUs have computed wrong products on some devices for some widths.
    """
    kind = model.expert_matmul
    rng = np.random.default_rng(0)
    rows = int(SIZES.sum()) + UNUSED
    shapes = ((rows, inputs), (len(SIZES), inputs, outputs), (rows, outputs))
    arrays = (normal(rng, shape, model.dtype) for shape in shapes)
    remedy = OTHER_VERSIONS
    if kind == 'tokamax':
        remedy = (
            f'install another version of tokamax (found {installed_version("tokamax") or "none"}), or set '
            'model.expert_matmul=ragged_dot, which needs much more memory and time on GPUs'
        )
    elif kind == 'megablox':
        remedy = 'set model.expert_matmul=ragged_dot'
    return KnownAnswer(
        f'product of experts (model.expert_matmul={kind})',
        f'matrices of {inputs} × {outputs}',
        partial(_run, kind),
        _exact,
        (*arrays, SIZES),
        NAMES,
        model.dtype,
        remedy,
    )


def _run(
    kind: str, x_RI: jax.Array, kernel_EIO: jax.Array, grad_RO: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, ...]:
    x_RI, grad_RO, is_used_R1 = _without_unused(x_RI, grad_RO, sizes_E)
    y_RO, *gradients = products_with_gradients(kind, x_RI, kernel_EIO, sizes_E, grad_RO)
    return jnp.where(is_used_R1, y_RO, 0), *gradients


def _exact(x_RI: jax.Array, kernel_EIO: jax.Array, grad_RO: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, ...]:
    x_RI, grad_RO, _ = _without_unused(x_RI, grad_RO, sizes_E)
    products: tuple[jax.Array, ...] = exact_products(x_RI, kernel_EIO, sizes_E, grad_RO)
    return products


def _without_unused(x_RI: jax.Array, grad_RO: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, ...]:
    """Sets unused rows and their gradients to 0, as the kernels require."""
    is_used_R1 = (jnp.arange(len(x_RI)) < sizes_E.sum())[:, None]
    return jnp.where(is_used_R1, x_RI, 0), jnp.where(is_used_R1, grad_RO, 0), is_used_R1


def product_errors(
    kind: str, x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: np.ndarray, grad_RO: jax.Array
) -> list[float]:
    """Returns the errors of the product, of the gradient of the rows and of the gradient of the matrices."""
    sizes = jnp.asarray(sizes_E)
    x_RI, grad_RO, is_used_R1 = _without_unused(x_RI, grad_RO, sizes)
    y_RO, *gradients = products_with_gradients(kind, x_RI, kernel_EIO, sizes, grad_RO)
    found = (jnp.where(is_used_R1, y_RO, 0), *gradients)
    return relative_errors(found, exact_products(x_RI, kernel_EIO, sizes, grad_RO))


@partial(jax.jit, static_argnums=0)
def products_with_gradients(
    kind: str, x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array, grad_RO: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the product and the gradients of the rows and of the matrices."""
    y_RO, pull = jax.vjp(lambda x, kernel: grouped_matmul(x, kernel, RowGroups(sizes_E, 1), kind), x_RI, kernel_EIO)
    return y_RO, *pull(grad_RO)


@jax.jit
def exact_products(
    x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array, grad_RO: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes the products and gradients by their formula in float32, one group after another."""
    x, kernel, grad = (array.astype(jnp.float32) for array in (x_RI, kernel_EIO, grad_RO))
    row, end_E = jnp.arange(len(x))[:, None], jnp.cumsum(sizes_E)

    def add(sums: tuple[jax.Array, jax.Array], group: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        end, size, kernel_IO = group
        of_group, grad_of_group = (jnp.where((row >= end - size) & (row < end), a, 0) for a in (x, grad))
        y_RO, grad_RI = sums
        return (y_RO + of_group @ kernel_IO, grad_RI + grad_of_group @ kernel_IO.T), of_group.T @ grad_of_group

    with jax.default_matmul_precision('highest'):
        (y_RO, grad_RI), grad_EIO = jax.lax.scan(
            add, (jnp.zeros_like(grad), jnp.zeros_like(x)), (end_E, sizes_E, kernel)
        )
    return y_RO, grad_RI, grad_EIO


def relative_errors(found: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """Returns the norm of each difference relative to the norm of the expected array; NaN if not finite."""
    return [
        float(np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b)) / np.linalg.norm(b))
        for a, b in zip(found, expected, strict=True)
    ]
