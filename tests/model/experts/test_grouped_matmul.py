"""Grouped matrix products against one product per row, for each implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.experts.dispatch import sort_by_expert, to_rows
from maxlm.model.experts.grouped_matmul import (
    RowGroups,
    block_size,
    grouped_matmul,
    looped_matmul,
    megablox_matmul,
    padded_rows,
)

E, IN, OUT = 5, 6, 7


def inputs(assignments, seed=0):
    """Returns one row per assignment, and the matrices."""
    rng = np.random.default_rng(seed)
    x, kernel = rng.normal(size=(len(assignments), IN)), rng.normal(size=(E, IN, OUT))
    return jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)


def products(x, kernel, experts, kind):
    """Returns the products in the order of the rows of `x`, computed from rows sorted by expert."""
    block = block_size(len(experts), E, kind)
    dispatch = sort_by_expert(experts[:, None], E, block)
    rows = grouped_matmul(to_rows(x, dispatch), kernel, RowGroups(dispatch.sizes_E, block), kind)
    return rows[dispatch.row_Nk[:, 0]]


@pytest.mark.parametrize('kind', ['loop', 'ragged_dot'])
@pytest.mark.parametrize('experts', [[0, 4, 4, 1, 0, 4, 4], [2] * 40, [3], [*range(5)] * 9], ids=len)
def test_products_and_gradients(kind, experts):
    experts = jnp.array(experts)
    x, kernel = inputs(experts)

    def plain(x, kernel):
        return jnp.einsum('RI,RIO->RO', x, kernel[experts])

    def grouped(x, kernel):
        return products(x, kernel, experts, kind)

    np.testing.assert_allclose(grouped(x, kernel), plain(x, kernel), atol=1e-5)
    # Negative control: the matrices of other experts give other products.
    assert np.abs(grouped(x, jnp.roll(kernel, 1, axis=0)) - plain(x, kernel)).max() > 0.1
    weights = np.random.default_rng(1).normal(size=(len(experts), OUT))
    expected, found = (
        jax.grad(lambda x, kernel, f=function: (f(x, kernel) * weights).sum(), argnums=(0, 1))(x, kernel)
        for function in (plain, grouped)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_groups_of_equal_size():
    x, kernel = inputs(range(3 * E))
    found = grouped_matmul(x, kernel, RowGroups(jnp.full(E, 3), 1), 'equal')
    np.testing.assert_allclose(
        found, np.einsum('EXI,EIO->EXO', x.reshape(E, 3, IN), kernel).reshape(-1, OUT), atol=1e-5
    )


def test_looped_products_read_only_matrices_with_rows():
    x, kernel = inputs(range(2))
    kernel = kernel.at[jnp.array([0, 1, 3])].set(jnp.nan)
    dispatch = sort_by_expert(jnp.array([[4], [2]]), E, 1)
    found = looped_matmul(
        to_rows(x, dispatch), lambda group: jnp.asarray(kernel)[group], RowGroups(dispatch.sizes_E, 1)
    )
    np.testing.assert_allclose(found, [x[1] @ kernel[2], x[0] @ kernel[4]], atol=1e-5)


@pytest.mark.parametrize('num_rows', [1, 4, 5, 64, 1000])
def test_padding_suffices_for_any_sizes(num_rows):
    block = block_size(num_rows, E, 'loop')
    assert block & (block - 1) == 0
    rng = np.random.default_rng(num_rows)
    for _ in range(20):
        # Up to E groups in which all sizes but one are 1 more than a multiple of the block, the most padding.
        sizes = np.bincount(rng.integers(0, rng.integers(1, E + 1), num_rows), minlength=E)
        assert (-(-sizes // block) * block).sum() <= padded_rows(num_rows, E, block)
    assert padded_rows(num_rows, E, 1) == num_rows


@pytest.mark.parametrize('num_rows', [24, 640])
def test_kernel_for_tpus(num_rows):
    """The kernel is interpreted. The rows after the last group are unused."""
    rng = np.random.default_rng(0)
    sizes = np.array([num_rows // 4, 0, num_rows // 2, 3, 1])
    experts = np.repeat(np.arange(E), sizes)
    used = len(experts)
    x = jnp.asarray(rng.normal(size=(num_rows, 128)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(E, 128, 128)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(used, 128)), jnp.float32)

    def plain(x, kernel):
        return (jnp.einsum('RI,RIO->RO', x[:used], kernel[experts]) * weights).sum()

    def grouped(x, kernel):
        return (megablox_matmul(x, kernel, jnp.asarray(sizes), interpret=True)[:used] * weights).sum()

    expected, found = (jax.value_and_grad(function, argnums=(0, 1))(x, kernel) for function in (plain, grouped))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found[1][0][:used], expected[1][0][:used], atol=1e-3)
    np.testing.assert_allclose(found[1][1], expected[1][1], atol=1e-3)
