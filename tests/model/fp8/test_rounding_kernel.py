"""The rounding kernel, interpreted on CPUs, against `quantize`, and its products against those of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.fp8 import kernel_products, products, rounding_kernel
from maxlm.model.fp8.kernel_products import Projection, round_input
from maxlm.model.fp8.rounding_kernel import Fp8Rounding, round_matrices
from maxlm.parallel.partitioning import SINGLE_DEVICE
from tests.small import small_config, small_layout

KINDS = [products.E4M3, products.E5M2]
SHAPES = {'full tiles': (32, 32), 'partial tiles': (37, 24)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Makes tiles so small that few rows and columns need several."""
    monkeypatch.setattr(rounding_kernel, 'TILE', (16, 8))


def matrix(shape, seed=0):
    """Returns elements of all magnitudes: some saturate, some become 0."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-10, 6, shape), jnp.bfloat16)


@jax.jit
def expected(x, scale):
    return [products.quantize(x, kind, scale).bits for kind in KINDS]


@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize('element', [None, np.inf, np.nan])
def test_codes_are_those_of_xla(shape, element):
    x, scale = matrix(shape), jnp.float32(2.0**-3)
    x = x if element is None else x.at[11, 17].set(element)

    def both(x):
        return x, x

    plan = [Fp8Rounding(kind, has_sums=True) for kind in KINDS]
    found = jax.jit(lambda x, scale: round_matrices([x], [scale, scale], plan, SINGLE_DEVICE, both))(x, scale)
    for rounded, bits, kind in zip(found, expected(x, scale), KINDS, strict=True):
        for ours in (rounded.codes.bits, rounded.transposed.bits.T):
            # There are several codes of NaN.
            np.testing.assert_array_equal(*(np.asarray(b).view(kind).astype(np.float32) for b in (ours, bits)))
        assert rounded.codes.scale == scale
        np.testing.assert_array_equal(rounded.largest, np.abs(np.asarray(x, np.float32)).max())
        exact = np.asarray(x, np.float64).sum(0)
        if element is None:
            np.testing.assert_allclose(rounded.sums, exact, rtol=0, atol=1e-6 * np.abs(x.astype(np.float32)).max())
        else:
            np.testing.assert_array_equal(np.isfinite(rounded.sums), np.isfinite(exact))


def test_results_of_a_function_are_rounded_to_the_dtype_of_its_inputs():
    a, b = matrix((37, 24)), matrix((37, 24), seed=1)
    scale = jnp.float32(1)
    plan = [Fp8Rounding(products.E4M3), Fp8Rounding(products.E5M2)]
    found = round_matrices([a, b], [scale, scale], plan, SINGLE_DEVICE, lambda a, b: (a * b, a - b))
    exact = [f(a.astype(np.float32), b.astype(np.float32)).astype(jnp.bfloat16) for f in (jnp.multiply, jnp.subtract)]
    for rounded, x, (kind, _) in zip(found, exact, plan, strict=True):
        np.testing.assert_array_equal(rounded.codes.bits, products.quantize(x, kind, scale).bits)


def test_each_device_rounds_its_rows():
    layout = small_layout(small_config(num_devices=2, mesh__fsdp=2))
    x, scale = matrix((64, 24)), jnp.float32(2.0**-3)
    plan = [Fp8Rounding(products.E4M3, has_sums=True)]

    def run(x, partitioning):
        return round_matrices([x], [scale], plan, partitioning)[0]

    found = jax.jit(lambda x: run(x, layout))(jax.device_put(x, layout.named('batch', 'activation')))
    alone = jax.jit(lambda x: run(x, SINGLE_DEVICE))(x)
    assert not found.codes.bits.sharding.is_fully_replicated
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize('has_bias', [True, False])
def test_products_are_those_of_xla(has_bias):
    rng = np.random.default_rng(0)
    x, kernel, gradient = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((32, 48), (48, 24), (32, 24)))
    bias = jnp.asarray(rng.normal(size=24), jnp.bfloat16)
    # With these scales, the largest elements of all arrays saturate.
    scales = jnp.array([2.0**-8, 2.0**-8, 2.0**-16])

    def kernel_product(x, kernel, bias, scales):
        codes = products.quantize(kernel, products.E4M3, scales[1])
        projection = Projection(kernel, bias if has_bias else None, jax.lax.stop_gradient(codes), scales)
        return kernel_products.product(x, projection, round_input(x, scales, SINGLE_DEVICE), SINGLE_DEVICE)

    def xla_product(x, kernel, bias, scales):
        codes = products.quantize(jax.lax.stop_gradient(kernel), products.E4M3, jax.lax.stop_gradient(scales)[1])
        y = products.product(x, kernel, codes, products.quantize_input(x, scales))
        return y + bias[None] if has_bias else y

    def run(product):
        y, pull = jax.vjp(product, x, kernel, bias, scales)
        return y, *pull(gradient)

    found, wanted = jax.jit(lambda: run(kernel_product))(), jax.jit(lambda: run(xla_product))()
    if has_bias:
        # XLA sums the gradient of the bias in bfloat16 on a CPU.
        wanted = (*wanted[:3], gradient.astype(jnp.float32).sum(0).astype(jnp.bfloat16), wanted[4])
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        ours, theirs = (np.asarray(array, np.float32) for array in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-8 * np.abs(theirs).max())
