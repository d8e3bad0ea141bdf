"""fp8 products: they equal products of rounded numbers, and residuals are stored in fp8."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlm.model import layer_loop
from maxlm.model.fp8 import products as fp8
from maxlm.model.layers import linear
from tests.parameters import abstract_params, decoder_graph, logits, random_params
from tests.small import small_batch, small_config

KINDS = [jnp.bfloat16, jnp.float32]


def operands(kind, rows=(64,)):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.normal(size=(*rows, 48)), kind)
    kernel_IO = jnp.asarray(0.02 * rng.normal(size=(48, 32)), jnp.float32)
    gradient = jnp.asarray(1e-7 * rng.normal(size=(*rows, 32)), kind)
    return x, kernel_IO, gradient


@jax.jit
def products(x, kernel_IO, gradient):
    """Returns the product and the gradients of x and the kernel."""

    def multiply(x, kernel_IO):
        codes = fp8.quantize(jax.lax.stop_gradient(kernel_IO), fp8.E4M3)
        return fp8.product(x, kernel_IO.astype(x.dtype), codes)

    y, pull = jax.vjp(multiply, x, kernel_IO)
    return y, *pull(gradient)


@jax.jit
def quantize(x):
    return fp8.quantize(x, fp8.E4M3)


def rounded(x, kind, top):
    """Returns values rounded to fp8 with one scale, in float64."""
    x = np.asarray(x, np.float32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / top))
    return (x / scale).astype(kind).astype(np.float64) * scale


def expected(x, kernel_IO, gradient):
    x, kernel_IO = (rounded(array, ml_dtypes.float8_e4m3fn, 448) for array in (x, kernel_IO))
    gradient = rounded(gradient, ml_dtypes.float8_e5m2, 57344)
    of_kernel = x.reshape(-1, x.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])
    return x @ kernel_IO, gradient @ kernel_IO.T, of_kernel


def difference(got, right):
    """Returns the largest difference, relative to the largest element."""
    return np.abs(np.asarray(got, np.float64) - right).max() / np.abs(right).max()


@pytest.mark.parametrize(('kind', 'rows'), [(jnp.bfloat16, (64,)), (jnp.float32, (64,)), (jnp.float32, (4, 16))])
def test_a_product_equals_that_of_the_rounded_numbers(kind, rows):
    """Rows have one axis, or two as with a length that is sharded over devices."""
    arrays = operands(kind, rows)
    # The sum is accumulated in float32 and rounded once.
    tolerance = {jnp.bfloat16: 2.0**-8, jnp.float32: 2.0**-22}[kind]
    exact = [np.asarray(array, np.float64) for array in arrays]
    unrounded = [exact[0] @ exact[1], exact[2] @ exact[1].T]
    for got, right in zip(products(*arrays), expected(*arrays), strict=True):
        assert got.dtype in (kind, jnp.float32)
        assert difference(got, right) < tolerance
        # Negative controls: a wrong scale, and numbers that are not rounded.
        assert difference(got, 2 * right) > 0.4
    for got, wrong in zip(products(*arrays), unrounded, strict=False):
        assert difference(got, wrong) > 0.01


def test_a_scale_that_is_too_small_is_detected(monkeypatch):
    def too_small(largest, top):
        return right(largest, top) / 2

    right = fp8._scale
    monkeypatch.setattr(fp8, '_scale', too_small)
    products.clear_cache()
    got = products(*operands(jnp.float32))
    products.clear_cache()
    assert not np.isfinite(got[0]).all()


@pytest.mark.parametrize('largest', [448.0, 449.0, 896.0, 1.0, 3.5, 1e30, 1e-25])
def test_scales_are_powers_of_two_that_fill_the_range(largest):
    codes = quantize(np.array([largest, -largest / 3], np.float32))
    mantissa, _ = np.frexp(float(codes.scale))
    assert mantissa == 0.5
    assert 224 < np.float32(largest) / float(codes.scale) <= 448
    values = np.asarray(codes.bits).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(values * float(codes.scale), [largest, -largest / 3], rtol=2.0**-4)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('zeros', [0, 1, 2])
def test_zeros_give_zeros(kind, zeros):
    arrays = list(operands(kind))
    arrays[zeros] = jnp.zeros_like(arrays[zeros])
    got = products(*arrays)
    # x affects the result and the kernel gradient, the kernel the result and the gradient of x, the gradient both.
    are_zero = {0: (0, 2), 1: (0, 1), 2: (1, 2)}[zeros]
    for number, array in enumerate(got):
        assert np.isfinite(array).all()
        assert (not np.any(array)) == (number in are_zero)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('place', [0, 1, 2])
def test_nonfinite_values_propagate(value, place):
    arrays = list(operands(jnp.bfloat16))
    # Negative control: without this value, all results are finite.
    assert all(np.isfinite(array).all() for array in products(*arrays))
    arrays[place] = arrays[place].at[3, 5].set(value)
    affected = {0: (0, 2), 1: (0, 1), 2: (1, 2)}[place]
    for number, array in enumerate(products(*arrays)):
        assert np.isnan(array).all() == (number in affected)


def test_small_and_large_arrays():
    x, kernel_IO, gradient = operands(jnp.float32)
    for factor in (1e-18, 1e18):
        for got, right in zip(
            products(x * factor, kernel_IO, gradient), expected(x * factor, kernel_IO, gradient), strict=True
        ):
            assert difference(got, right) < 2.0**-22
    # Values below the smallest scale become zero without harm.
    assert all(np.isfinite(array).all() for array in products(x * 1e-38, kernel_IO, gradient))


@pytest.mark.parametrize('kind', KINDS)
def test_the_backward_pass_stores_fp8_residuals(kind):
    x, kernel_IO, _ = operands(kind)

    def kept(multiply):
        """Returns the bytes of a product's residuals."""

        def residuals(x, kernel_IO, codes):
            return jax.vjp(lambda x, kernel_IO: multiply(x, kernel_IO, codes), x, kernel_IO)[1]

        codes = jax.eval_shape(quantize, kernel_IO)
        found = jax.eval_shape(residuals, x, kernel_IO.astype(kind), codes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found))

    assert kept(fp8.product) == x.size + kernel_IO.size + 2 * 4
    # Negative control: without fp8, the residuals have the same size but a larger dtype.
    assert kept(lambda x, kernel_IO, _: x @ kernel_IO) == (x.size + kernel_IO.size) * jnp.dtype(kind).itemsize


@functools.cache
def traced(**overrides):
    """Returns the program for loss and gradients of a small model."""
    config = small_config(**{'model__matmul_precision': 'fp8', 'model__family': 'llama', **overrides})
    graph, tokens_BT = decoder_graph(config.model), small_batch(config)['tokens'][:2]
    loss = jax.value_and_grad(lambda params: jnp.square(logits(graph, params, tokens_BT)).mean())
    return jax.jit(loss).trace(abstract_params(config))


def num_scales(program):
    """Counts the reductions of complete arrays to their maximum in a program."""
    return len(re.findall(r':f32\[\] = reduce_max\[', str(program.jaxpr)))


@pytest.fixture(scope='module')
def plain():
    """Returns the program without remat, its parameters and its results."""
    program = traced()
    params = random_params(small_config(model__matmul_precision='fp8', model__family='llama'))
    return program, params, jax.device_get(program.lower().compile()(params))


@pytest.mark.parametrize('remat', ['dots', 'full'])
def test_remat_changes_nothing(remat, plain):
    _, params, (value, gradients) = plain
    other_value, other_gradients = traced(model__remat_policy=remat).lower().compile()(params)
    np.testing.assert_allclose(other_value, value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), other_gradients, gradients)


@pytest.mark.parametrize('remat', ['dots', 'dots_no_batch', 'full'])
def test_remat_does_not_recompute_scales(remat, plain):
    # Inputs, kernels and gradients of seven projections have a scale in the body of the loop. XLA merges the scales of
    # the shared inputs of query, key and value, and of gate and up.
    assert num_scales(traced(model__remat_policy=remat)) == num_scales(plain[0]) == 21


def test_scales_are_recomputed_without_the_rule(monkeypatch):
    """Negative control of the previous test."""
    monkeypatch.setattr(layer_loop, 'SCALE', 'another')
    assert num_scales(traced.__wrapped__(model__remat_policy='full')) > 21


def products_by_type(**overrides):
    text = traced.__wrapped__(**overrides).lower().as_text()
    return collections.Counter(re.findall(r'dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)', text))


def test_the_projections_of_blocks_are_in_8_bits_and_nothing_else(monkeypatch):
    monkeypatch.setattr(linear, 'MIN_FUSED_ROWS', 1)
    plain, mixed = products_by_type(model__matmul_precision='default'), products_by_type()
    # Each of seven projections has one product in the forward pass and two in the backward pass.
    assert {kinds: count for kinds, count in mixed.items() if kinds != ('f32', 'f32')} == {
        ('f8E4M3FN', 'f8E4M3FN'): 7,
        ('f8E5M2', 'f8E4M3FN'): 7,
        ('f8E4M3FN', 'f8E5M2'): 7,
    }
    # Products of attention and head stay in float32. Without fp8, query, key and value are fused, as are gate and up.
    assert set(plain) == {('f32', 'f32')}
    assert mixed['f32', 'f32'] == plain['f32', 'f32'] - 3 * (7 - 3) > 0
