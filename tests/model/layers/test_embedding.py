"""The gradients of row lookups: sums in float32, on each device and over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.layers.embedding import look_up
from maxlm.parallel.partitioning import SINGLE_DEVICE, SingleDevice
from tests.parallel.test_layout import split_by

AXES = ('vocab', 'embed')
# The arrays of the gradient differ between GPUs and other platforms.
PLATFORMS = [SINGLE_DEVICE, SingleDevice('gpu')]


@pytest.mark.parametrize('partitioning', PLATFORMS)
def test_terms_of_a_frequent_token_are_not_rounded_away(partitioning):
    table = jnp.zeros((3, 8), jnp.bfloat16)
    tokens = jnp.ones((4, 1024), jnp.int32)
    gradient = jax.grad(lambda table: look_up(table, tokens, AXES, partitioning).astype(jnp.float32).sum())(table)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[:, 0].astype(np.float32), [0, tokens.size, 0])
    # Control: a sum in bfloat16 ends where 1 is less than half of its last digit.
    plain = jax.grad(lambda table: table[tokens].astype(jnp.float32).sum())(table)
    assert plain[1, 0] < tokens.size / 2


@pytest.mark.parametrize('partitioning', PLATFORMS)
def test_gradient_equals_that_of_indexing(partitioning):
    rng = np.random.default_rng(0)
    table, weights = (rng.normal(size=size).astype(np.float32) for size in ((16, 5), (2, 12, 5)))
    tokens = rng.integers(0, 16, (2, 12))

    def gradient(rows):
        return jax.grad(lambda table: (rows(table) ** 2 * weights).sum())(table)

    expected = gradient(lambda table: table[tokens])
    found = gradient(lambda table: look_up(table, jnp.asarray(tokens), AXES, partitioning))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    'mesh',
    [
        {'zero': 3},
        {'zero': 2, 'mesh__context': 2, 'mesh__data': 1},
        # The rows of the table are sharded.
        {'zero': 1, 'mesh__tensor': 2, 'mesh__data': 1},
    ],
)
def test_gradient_over_devices(mesh):
    _, layout = split_by(**mesh)
    rng = np.random.default_rng(0)
    table, weights = (rng.normal(size=size).astype(np.float32) for size in ((16, 32), (8, 12, 32)))
    tokens = rng.integers(0, 16, (8, 12))

    def loss(table, tokens, weights):
        rows = look_up(layout.gathered(table, AXES), tokens, AXES, layout)
        return (rows**2 * weights).sum()

    placed = [
        jax.device_put(array, layout.named(*axes))
        for array, axes in ((table, AXES), (tokens, ('batch', 'length')), (weights, ('batch', 'length', 'activation')))
    ]
    found = jax.jit(jax.grad(loss))(*placed)
    expected = jax.grad(lambda table: (table[tokens] ** 2 * weights).sum())(table)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert found.sharding.is_equivalent_to(layout.of_gradients.named(*AXES), 2)
