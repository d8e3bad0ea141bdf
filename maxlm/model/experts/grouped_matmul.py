"""Matrix products of groups of rows, with a different matrix for each group (Gale et al. 2023, "MegaBlocks").

Rows are sorted by group. Five implementations compute the same products:

    ragged_dot   `jax.lax.ragged_dot`. XLA has a kernel for it on TPUs, except for the gradient of the matrices, which
                 it expands to a dense product. It expands all products on GPUs and CPUs.
    tokamax      `tokamax.ragged_dot`, with kernels for GPUs. For 16,384 rows, 64 matrices of 2,048 × 1,408 and an H100,
                 it needs 46 MB of temporary memory and XLA's expansion 18.8 GB.
    megablox     `jax.experimental.pallas.ops.tpu.megablox`, a kernel for TPUs, also for the gradient of the matrices.
    loop         a loop over blocks of rows, each of which belongs to one group. On a CPU it takes about 1.3 times as
                 long as one dense product of the same size, and XLA's expansion more than ten times as long.
    equal        a batched product, for groups of equal size.

Shapes: R rows, I inputs, O outputs, E groups, Z rows of a block, X blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.experts.tokamax_matmul import tokamax_matmul

# Largest number of rows of a block. Larger blocks contain more padding.
MAX_BLOCK = 128
# Tiles of the kernel for TPUs. The number of rows is padded to a multiple of the row tile.
ROW_TILE, SMALL_ROW_TILE, COLUMN_TILE = 512, 128, 1024


class RowGroups(NamedTuple):
    """Consecutive groups of rows.

    Attributes:
        sizes_E: number of rows of each group, including padding at its end. Rows after the last group are unused.
        block: the sizes are multiples of this number; 1 unless the implementation is `loop`.
    """

    sizes_E: jax.Array
    block: int


def block_size(num_rows: int, num_groups: int, kind: str) -> int:
    """Returns the number of which group sizes must be multiples: for `loop`, about the mean size of a group."""
    if kind != 'loop':
        return 1
    return min(MAX_BLOCK, 1 << max(0, (num_rows // num_groups - 1).bit_length()))


def padded_rows(num_rows: int, num_groups: int, block: int) -> int:
    """Returns the number of rows after each group is padded to a multiple of `block`, for any sizes of the groups."""
    return block * (num_rows // block + min(num_rows, num_groups)) if block > 1 else num_rows


def grouped_matmul(x_RI: jax.Array, kernel_EIO: jax.Array, groups: RowGroups, kind: str) -> jax.Array:
    """Returns the product of each row with the matrix of its group, [R, O] in the dtype of x.

    The values of unused rows are undefined, and their gradients must be 0.

    Args:
        x_RI: rows in the order of their groups.
        kernel_EIO: matrices, in the dtype of x.
        groups: groups of the rows.
        kind: implementation; see the module docstring.

    Raises:
        InputError: the package of the implementation is not installed, or has no kernel for the device.
    """
    if kind == 'loop':
        return _loop(x_RI, kernel_EIO, _group_of_block(groups, len(x_RI)))
    if kind == 'equal':
        y_ERO = x_RI.reshape(len(kernel_EIO), -1, x_RI.shape[1]) @ kernel_EIO
        return y_ERO.reshape(len(x_RI), -1)
    if kind == 'megablox':
        return megablox_matmul(x_RI, kernel_EIO, groups.sizes_E)
    if kind == 'tokamax':
        return tokamax_matmul(x_RI, kernel_EIO, groups.sizes_E)
    return jax.lax.ragged_dot(x_RI, kernel_EIO, groups.sizes_E)


def megablox_matmul(
    x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Returns the products of `grouped_matmul` of kind `megablox`; `interpret` runs the kernel without a TPU."""
    # Imported here, because the import takes a third of a second.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    R = len(x_RI)
    row_tile = SMALL_ROW_TILE if R < ROW_TILE else ROW_TILE
    tiles = (row_tile, *(min(COLUMN_TILE, size) for size in kernel_EIO.shape[1:]))
    x_RI = jnp.pad(x_RI, [(0, -R % row_tile), (0, 0)])
    # `custom_vjp` requires positional arguments: no group offset, no existing output and no transposed matrices.
    y_RO: jax.Array = gmm(x_RI, kernel_EIO, sizes_E.astype(jnp.int32), x_RI.dtype, tiles, None, None, False, interpret)
    return y_RO[:R]


def looped_matmul(x_RI: jax.Array, kernel_of: Callable[[jax.Array], jax.Array], groups: RowGroups) -> jax.Array:
    """Returns the products of `grouped_matmul` of kind `loop`, without a gradient.

    Only the matrices of groups with rows are read, one at a time, from `kernel_of(group)`, which returns [I, O].
    """
    return _looped(x_RI, kernel_of, _group_of_block(groups, len(x_RI)))


def _group_of_block(groups: RowGroups, num_rows: int) -> jax.Array:
    """Returns the group of each block [X]. For unused blocks it is the last group."""
    starts_X = jnp.arange(0, num_rows, groups.block)
    found_X = jnp.searchsorted(jnp.cumsum(groups.sizes_E), starts_X, side='right')
    return jnp.minimum(found_X, len(groups.sizes_E) - 1)


def _looped(x_RI: jax.Array, kernel_of: Callable[[jax.Array], jax.Array], group_X: jax.Array) -> jax.Array:
    x_XZI = x_RI.reshape(len(group_X), -1, x_RI.shape[1])
    y_XZO = jax.lax.map(lambda block: block[0] @ kernel_of(block[1]), (x_XZI, group_X))
    return y_XZO.reshape(len(x_RI), -1)


@jax.custom_vjp
def _loop(x_RI: jax.Array, kernel_EIO: jax.Array, group_X: jax.Array) -> jax.Array:
    """Computes the products as a loop. JAX's own derivative would add a complete array of matrices for every block."""
    return _looped(x_RI, lambda group: kernel_EIO[group], group_X)


def _forward(x_RI: jax.Array, kernel_EIO: jax.Array, group_X: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _loop(x_RI, kernel_EIO, group_X), (x_RI, kernel_EIO, group_X)


def _backward(saved: tuple[jax.Array, ...], grad_RO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_RI, kernel_EIO, group_X = saved
    grad_x_RI = _looped(grad_RO, lambda group: kernel_EIO[group].T, group_X)

    def add(grad_EIO: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_ZI, grad_ZO, group = inputs
        product_IO = jnp.dot(x_ZI.T, grad_ZO, preferred_element_type=jnp.float32)
        return grad_EIO.at[group].add(product_IO), None

    blocks = (array.reshape(len(group_X), -1, array.shape[1]) for array in (x_RI, grad_RO))
    grad_EIO, _ = jax.lax.scan(add, jnp.zeros(kernel_EIO.shape, jnp.float32), (*blocks, group_X))
    return grad_x_RI, grad_EIO.astype(kernel_EIO.dtype), None


_loop.defvjp(_forward, _backward)
