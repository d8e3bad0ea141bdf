"""Tests products of inputs in 8 bits with packed kernels, against llama.cpp's format and products of floats."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from maxlm.errors import InputError
from maxlm.model import packed_kernels
from maxlm.model.layers import rounded_inputs
from maxlm.model.layers.weight_only_quantization import Codes, Weights, dequantize, quantize
from maxlm.runtime.cpu_kernels import register_cpu_kernels
from tests.small import EXPERTS, LATENT, small_config

# Kind of the codes, inputs that share a scale, input axes and output axes. 100 inputs and 33 outputs need padding.
KERNELS = {
    'int8': ('int8', 0, (64,), (40,)),
    'int8, padded': ('int8', 0, (100,), (33,)),
    'int8, two input axes': ('int8', 0, (3, 20), (2, 65)),
    'int8, groups': ('int8', 32, (2, 64), (48,)),
    'int4': ('int4', 32, (96,), (3, 16)),
    'int4, large groups': ('int4', 64, (2, 128), (33,)),
}


@pytest.fixture(autouse=True)
def kernels():
    assert register_cpu_kernels()


def inputs(num_rows, num_inputs):
    """Returns rows whose blocks have scales of several orders of magnitude."""
    rng = np.random.default_rng(num_rows)
    return (rng.normal(size=(num_rows, num_inputs)) * 10 ** rng.uniform(-2, 2, (num_rows, 1))).astype(np.float32)


def made(name):
    """Returns the kernel [I, O] in float32, and a function that multiplies rounded rows with it."""
    kind, group, in_shape, out_shape = KERNELS[name]
    kernel = np.random.default_rng(1).normal(size=(*in_shape, *out_shape)).astype(np.float32)
    stored, num_in = quantize(jnp.asarray(kernel), len(in_shape), Weights(kind, group)), len(in_shape)
    codes = packed_kernels.pack_codes(stored.codes, num_in, kind)
    scales = packed_kernels.pack_scales(stored.scales, num_in)
    num_outputs = int(np.prod(out_shape))
    values = dequantize(stored, num_in, kind, jnp.float32).reshape(-1, num_outputs)
    return np.asarray(values), lambda x: np.asarray(
        rounded_inputs.product(jnp.asarray(x), Codes(codes, scales), num_outputs, kind)
    )


@pytest.mark.parametrize('num_rows', [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize('name', KERNELS)
def test_the_product_equals_that_of_rounded_floats(name, num_rows):
    kernel, multiply = made(name)
    x = inputs(num_rows, len(kernel))
    found, rounded = multiply(x), np.asarray(rounded_inputs.round_rows(jnp.asarray(x)), np.float64)
    scale = np.abs(x).max(axis=1, keepdims=True) * np.sqrt(len(kernel))
    assert np.max(np.abs(found - rounded @ kernel) / scale) < 1e-6
    # Control: rounding changes the product.
    assert np.max(np.abs(found - x @ kernel) / scale) > 1e-3


def test_rows_are_rounded_as_in_llama_cpp():
    x = inputs(5, 96)
    blocks = quants.quantize(x, GGMLQuantizationType.Q8_0).reshape(5, 3, 34)
    # A block has a scale in float16 and 32 codes.
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    codes = blocks[..., 2:].view(np.int8)
    exact = np.abs(x.reshape(5, 3, 32)).max(axis=2, keepdims=True) / 127
    assert np.allclose(scales, exact, rtol=1e-3)
    assert np.allclose(rounded_inputs.round_rows(jnp.asarray(x)), (codes * exact).reshape(5, 96), rtol=1e-6)


@pytest.mark.parametrize('name', ['int8, padded', 'int4'])
def test_a_row_does_not_depend_on_the_others(name):
    kernel, multiply = made(name)
    x = inputs(7, len(kernel))
    assert np.array_equal(multiply(x), np.concatenate([multiply(x[row : row + 1]) for row in range(7)]))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_nan(value):
    kernel, multiply = made('int8, padded')
    x = inputs(2, len(kernel))
    x[1, 99] = value
    found = multiply(x)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
    assert np.isnan(np.asarray(rounded_inputs.round_rows(jnp.asarray(x)))[1, 96:]).all()


def test_zeros_give_zeros():
    kernel, multiply = made('int4')
    assert not multiply(np.zeros((3, len(kernel)), np.float32)).any()


def test_a_table_is_the_kernel_of_the_logits():
    table = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    table[3] = 0
    codes, scales = packed_kernels.pack_table(table)
    x = jnp.asarray(inputs(3, 64))
    found = np.asarray(rounded_inputs.product(x, Codes(codes, scales), 50, 'int8'))
    expected = np.asarray(x) @ table.T
    assert not found[:, 3].any()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ('family', 'settings', 'message'),
    [
        ({}, {'weight_quantization': 'fp8'}, 'not fp8; use --quantize=w8a8'),
        ({}, {'weight_quantization': 'int4', 'quantization_group_size': 16}, 'int4 or w8a8'),
        ({}, {'weight_quantization': 'int8', 'quantization_group_size': 16}, '16 inputs of blocks.attention.query'),
        (EXPERTS, {'weight_quantization': 'int8'}, 'models with experts; use --quantize=int8'),
        (LATENT, {'weight_quantization': 'int8'}, 'models with latent attention; use --quantize=int8'),
    ],
)
def test_other_models_are_refused(family, settings, message):
    config = small_config(**{'model__family': 'llama', 'model__dim': 64, **family})
    with pytest.raises(InputError, match=message):
        rounded_inputs.check_model(dataclasses.replace(config.model, **settings))
