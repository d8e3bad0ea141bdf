"""Matrix products of groups of rows with the kernels of Tokamax for GPUs (https://github.com/openxla/tokamax).

Shapes: R rows, I inputs, O outputs, E groups; P and Q are axes of either operand.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
from absl import flags

from maxlm.errors import InputError
from maxlm.installation import pip_install

# The first kernels that support a product on the device are used. Mosaic has kernels for Hopper and Blackwell, Triton
# for all GPUs since Ampere. XLA's expansion, which needs much more memory and time, is not among them.
_KERNELS = ('mosaic', 'triton')
# Mosaic requires widths of 128 bytes or a multiple of them; the ranks of adapters are smaller. On an H200 its products
# were exact for widths of 256 and 128. They were off by 6 % for 192 and 320, which are not multiples of 128.
_MOSAIC_WIDTH = 128


def _products(contracted: tuple[int, int], *, has_groups: bool) -> jax.lax.RaggedDotDimensionNumbers:
    """Returns the axes of a product: the contracted axis of each operand, and whether the second one has groups."""
    lhs, rhs = contracted
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((lhs,), (rhs,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,) if has_groups else (),
    )


@jax.custom_vjp
def tokamax_matmul(x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns the products of `grouped_matmul` of kind `tokamax`. Unused rows are 0.

    Tokamax's own gradient uses the kernels of the forward pass. On Blackwell, Mosaic has none for the gradients.

    Raises:
        InputError: Tokamax is not installed, or has no kernel for the product on this device.
    """
    product_RO = _product(x_RI, kernel_EIO, sizes_E, _products((1, 1), has_groups=True))
    return _used(product_RO, sizes_E)


def _forward(
    x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return tokamax_matmul(x_RI, kernel_EIO, sizes_E), (x_RI, kernel_EIO, sizes_E)


def _backward(saved: tuple[jax.Array, jax.Array, jax.Array], grad_RO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_RI, kernel_EIO, sizes_E = saved
    grad_RI = _product(grad_RO, kernel_EIO, sizes_E, _products((1, 2), has_groups=True))
    grad_EIO = _product(x_RI, grad_RO, sizes_E, _products((0, 0), has_groups=False))
    # For a group without rows, the kernel of Triton returns the product of the rows before it.
    grad_EIO = jnp.where((sizes_E > 0)[:, None, None], grad_EIO, 0)
    return _used(grad_RI, sizes_E), grad_EIO, None


tokamax_matmul.defvjp(_forward, _backward)


def _used(y_RO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns the rows with 0 in those after the last group, which kernels do not write.

    For the gradient of the last group's matrix, Mosaic multiplies the unused rows of a block by 0, so NaN would remain.
    """
    is_used_R = jnp.arange(len(y_RO)) < sizes_E.sum()
    return jnp.where(is_used_R[:, None], y_RO, 0)


def _product(
    lhs_RP: jax.Array, rhs: jax.Array, sizes_E: jax.Array, axes: jax.lax.RaggedDotDimensionNumbers
) -> jax.Array:
    # For the gradient of the matrices, the first operand is transposed, so that the rows are its width.
    widths = (*lhs_RP.shape[rhs.ndim - 2 :], *rhs.shape[1:])
    kernels = _KERNELS if all(width % _MOSAIC_WIDTH == 0 for width in widths) else _KERNELS[1:]
    try:
        product: jax.Array = _tokamax().ragged_dot_general(
            lhs_RP, rhs, sizes_E, axes, preferred_element_type=lhs_RP.dtype, implementation=kernels
        )
    except (NotImplementedError, ExceptionGroup) as error:
        # Tokamax raises the error of its only kernel, or a group with the error of each.
        reason = error.exceptions[-1] if isinstance(error, ExceptionGroup) else error
        raise InputError(
            f'model.expert_matmul=tokamax: no kernel for a product of {lhs_RP.dtype} on this device ({reason}); set '
            'model.expert_matmul=ragged_dot, which needs much more memory and time on GPUs'
        ) from error
    return product


def _tokamax() -> ModuleType:
    try:
        import tokamax
    except ImportError as error:
        raise InputError(
            f'model.expert_matmul=tokamax: the package tokamax is not installed; run {pip_install("experts")}, or '
            'set model.expert_matmul=ragged_dot, which needs much more memory and time on GPUs'
        ) from error
    # Tokamax reads options from absl's flags. Otherwise it would parse the command line, which has maxlm's options.
    flags.FLAGS.mark_as_parsed()
    module: ModuleType = tokamax
    return module
