"""fp8 products with delayed scaling: given scales, saturation, and largest elements as the gradient of the scales."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlm.model.fp8 import products as fp8

E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)
SCALES = (2.0**-6, 2.0**-12, 2.0**-30)


def operands(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 48)).astype(np.float32)
    kernel_IO = (0.02 * rng.normal(size=(48, 32))).astype(np.float32)
    gradient = (1e-7 * rng.normal(size=(64, 32))).astype(np.float32)
    return x, kernel_IO, gradient


@jax.jit
def products(x, kernel_IO, gradient, scales):
    """Returns the product and the gradients of x, the kernel and the scales."""

    def multiply(x, kernel_IO, scales):
        codes = fp8.quantize(jax.lax.stop_gradient(kernel_IO), fp8.E4M3, jax.lax.stop_gradient(scales)[1])
        return fp8.product(x, kernel_IO, codes, fp8.quantize_input(x, scales))

    y, pull = jax.vjp(multiply, x, kernel_IO, scales)
    return y, *pull(gradient)


def rounded(x, scale, kind, top):
    return np.clip(x / scale, -top, top).astype(kind).astype(np.float64) * scale


@pytest.mark.parametrize('factor', [1, 0.125])
def test_products_use_the_given_scales_and_saturate(factor):
    """With smaller scales, the largest elements exceed the range."""
    scales = factor * np.array(SCALES, np.float32)
    x, kernel_IO, gradient = operands()
    narrow = [
        rounded(array, scale, *kind)
        for array, scale, kind in zip((x, kernel_IO, gradient), scales, (E4M3, E4M3, E5M2), strict=True)
    ]
    assert np.array_equal(abs(narrow[0]).max() == 448 * scales[0], factor < 1)
    expected = narrow[0] @ narrow[1], narrow[2] @ narrow[1].T, narrow[0].T @ narrow[2]
    found = products(x, kernel_IO, gradient, scales)
    for got, right in zip(found, expected, strict=False):
        np.testing.assert_allclose(got, right, rtol=0, atol=2.0**-20 * abs(right).max())
    # Maxima are those of the arrays, not of the saturated values. The kernel is recorded once per step.
    np.testing.assert_array_equal(found[3], [abs(x).max(), 0, abs(gradient).max()])


def test_other_scales_give_other_products():
    """Negative control of the previous test."""
    first, second = (products(*operands(), np.float32(f) * np.array(SCALES, np.float32))[0] for f in (1, 2.0**12))
    assert np.abs(first - second).max() > 1e-3 * np.abs(first).max()


@pytest.mark.parametrize(('place', 'position'), [(0, 0), (2, 2)])
@pytest.mark.parametrize('value', [np.inf, np.nan])
def test_nonfinite_elements_are_recorded(place, position, value):
    arrays = list(operands())
    arrays[place][3, 5] = value
    maxima = np.asarray(products(*arrays, np.array(SCALES, np.float32))[3])
    assert list(np.isfinite(maxima)) == [position != index for index in range(3)]


def test_scales_are_the_lowest_powers_of_two_whose_range_contains_the_largest_elements():
    largest = jnp.array([[448.0, 449.0, 57344.0], [0.0, 3.0, 1e-9]])
    expected = [[1, 2, 1], [1, 2.0**-7, 2.0 ** np.ceil(np.log2(1e-9 / 57344))]]
    np.testing.assert_array_equal(fp8.delayed_scales(largest), expected)
