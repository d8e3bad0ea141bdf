"""MXFP8 products: they equal products of numbers that NumPy rounds in blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlm.model.fp8 import mxfp8
from maxlm.training.known_answers.answer import find_mistake
from maxlm.training.known_answers.layers import product_answer
from tests.small import small_config

BLOCK = 32


def rounded(x):
    """Returns values rounded to MXFP8 along the last axis, in float64."""
    x = np.asarray(x, np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(-1, keepdims=True)
    # ml_dtypes converts to the nearest number, so the exponent is rounded up here.
    scale = (2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-30) / 448))).astype(ml_dtypes.float8_e8m0fnu)
    codes = (blocks / scale.astype(np.float64)).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


@pytest.fixture(scope='module')
def arrays():
    """Rows, kernel and gradient, whose blocks have sizes that differ by orders of magnitude."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return np.float32(rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, (shape[0], 1)))

    return [jnp.asarray(x, jnp.bfloat16) for x in (random(64, 96), random(96, 32), random(64, 32))]


def test_products_equal_those_of_the_rounded_numbers(arrays):
    x_MI, kernel_IO, of_y_MO = arrays
    y_MO, pull = jax.vjp(lambda x, kernel: mxfp8.product(x, kernel, 'cpu'), x_MI, kernel_IO)
    x, kernel, of_y = (np.asarray(array, np.float32) for array in arrays)
    expected = [rounded(x) @ rounded(kernel.T).T, rounded(of_y) @ rounded(kernel).T, rounded(x.T) @ rounded(of_y.T).T]
    plain = [x @ kernel, of_y @ kernel.T, x.T @ of_y]
    for got, right, wrong in zip((y_MO, *pull(of_y_MO)), expected, plain, strict=True):
        assert got.dtype == jnp.bfloat16
        largest = np.abs(right).max(axis=-1, keepdims=True)
        error = np.abs(np.asarray(got, np.float64) - right) / largest
        assert error.max() < 2.0**-8
        # Negative control: numbers that are not rounded.
        assert (np.abs(wrong - right) / largest).max() > 0.01


def test_no_element_is_clipped():
    """The largest element of each block keeps its size up to rounding, at both ends of the range of float32."""
    x = jnp.outer(jnp.asarray([1e-37, 1.0, 449.0, 1e38], jnp.float32), jnp.linspace(0.0, 1.0, 64, dtype=jnp.float32))
    np.testing.assert_allclose(np.asarray(mxfp8.rounded(x)), x, rtol=2.0**-4, atol=1e-40)
    assert not np.asarray(mxfp8.rounded(jnp.zeros((1, 32)))).any()


@pytest.mark.parametrize('value', [np.inf, np.nan])
def test_a_block_that_is_not_finite_is_nan(value):
    x = jnp.ones((2, 64)).at[1, 40].set(value)
    found = np.isnan(np.asarray(mxfp8.rounded(x)))
    assert found[1, 32:].all()
    assert found.sum() == BLOCK


def test_a_projection_passes_its_known_answer():
    model = small_config(model__matmul_precision='mxfp8').model
    answer = product_answer(model, 32, 64, 96)
    assert 'mxfp8' in answer.kernel
    assert find_mistake(answer, jax.devices()[:1]) is None
    wrong = answer._replace(run=lambda *inputs: tuple(1.1 * x for x in answer.run(*inputs)))
    assert find_mistake(wrong, jax.devices()[:1]) is not None
