"""Quantized kernels: accuracy of codes and scales, use in the model, and equality on all layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.layers.weight_only_quantization import (
    CODE_DTYPES,
    Weights,
    code_shapes,
    dequantize,
    group_size,
    quantization_error,
    quantize,
    quantized_kernels,
    stored_bytes,
)
from maxlm.training.state import abstract_model, param_shardings
from tests.parameters import decoder_graph, random_params
from tests.small import small_config, small_layout

# Number of input axes, and how to store [4, 24, 10].
CASES = [
    (1, Weights('int8', 0)),
    (2, Weights('int8', 8)),
    (1, Weights('int4', 32)),
    (2, Weights('int4', 8)),
    (1, Weights('fp8', 0)),
    (2, Weights('fp8', 12)),
]
# Root mean square error, relative to that of normally distributed values.
ERRORS = {'int8': 0.012, 'int4': 0.12, 'fp8': 0.03}


def kernel(seed=0, shape=(4, 24, 10)):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)


@functools.partial(jax.jit, static_argnums=(1, 2))
def stored_and_back(values, num_in, weights):
    stored = quantize(values, num_in, weights)
    return stored, dequantize(stored, num_in, weights.kind, jnp.float32)


def both_ways(values, num_in, weights):
    stored, again = stored_and_back(values, num_in, weights)
    return stored, np.asarray(again)


@pytest.mark.parametrize(('num_in', 'weights'), CASES, ids=str)
def test_round_trip(num_in, weights):
    values = kernel()
    stored, again = both_ways(values, num_in, weights)
    assert (stored.codes.shape, stored.scales.shape) == code_shapes(values.shape, num_in, weights)
    assert (stored.codes.dtype, stored.scales.dtype) == (CODE_DTYPES[weights.kind], jnp.bfloat16)
    assert stored_bytes(values.shape, num_in, weights) == stored.codes.nbytes + stored.scales.nbytes
    error = np.sqrt(np.mean((again - values) ** 2)) / np.sqrt(np.mean(values**2))
    assert 0 < error < ERRORS[weights.kind]
    # Values that codes represent exactly are unchanged.
    _, third = both_ways(again, num_in, weights)
    assert np.sqrt(np.mean((third - again) ** 2)) < 0.3 * np.sqrt(np.mean((again - values) ** 2))
    # Negative control: permuted codes have no resemblance.
    rolled = stored._replace(codes=np.roll(stored.codes, 1, axis=-1))
    moved = jax.jit(lambda x: dequantize(x, num_in, weights.kind, jnp.float32))(rolled)
    assert np.sqrt(np.mean((np.asarray(moved) - values) ** 2)) > np.sqrt(np.mean(values**2))


def test_int4_by_hand():
    # The search finds the scales 1 and 0.5 of the columns, because both are exact.
    expected = np.array([[-8, 3.5], [7, -4], [1, 0], [-3, 0.5]], np.float32)
    stored, again = both_ways(expected, 1, Weights('int4', 0))
    assert np.array_equal(again, expected)
    codes = np.round(expected / np.asarray(stored.scales, np.float32)).astype(np.int64)
    # The first value of a pair is in the low four bits.
    assert np.array_equal(np.asarray(stored.codes), (codes[::2] & 15) | ((codes[1::2] & 15) << 4))


@pytest.mark.parametrize('kind', ['int8', 'int4', 'fp8'])
def test_zeros_and_extremes(kind):
    values = np.zeros((16, 3), np.float32)
    values[0, 1], values[3, 2] = 1e-30, -1e30
    _, again = both_ways(values, 1, Weights(kind, 0))
    assert np.isfinite(again).all()
    assert np.array_equal(again[:, 0], values[:, 0])
    np.testing.assert_allclose(again, values, rtol=0.01)


def test_the_search_is_better_than_the_largest_element_alone():
    # For heavy-tailed values, clipping the tail improves the resolution of other values.
    values = np.random.default_rng(0).standard_t(4, (64, 32)).astype(np.float32)
    _, again = both_ways(values, 1, Weights('int4', 0))
    scales = np.abs(values).max(axis=0) / 7
    plain = np.round(values / scales) * scales
    assert np.sum((again - values) ** 2) < 0.8 * np.sum((plain - values) ** 2)


def test_finer_groups_are_nearer():
    values = np.random.default_rng(0).standard_normal((128, 16)).astype(np.float32)
    errors = [np.sum((both_ways(values, 1, Weights('int4', group))[1] - values) ** 2) for group in (0, 32, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[0]


def test_sizes_that_fit():
    assert [group_size(96, group) for group in (0, 128, 64, 32, 33)] == [0, 96, 48, 32, 32]
    assert quantization_error((4, 24), Weights('int4', 32)) == ''
    assert 'odd number of inputs (25)' in quantization_error((25,), Weights('int4', 0))
    assert quantization_error((25,), Weights('int8', 0)) == ''
    assert 'no group size from 8 to 32' in quantization_error((74,), Weights('int4', 32))
    assert quantization_error((6,), Weights('int4', 32)) == ''


MODEL = {
    'model__family': 'llama',
    'model__num_kv_heads': 2,
    'model__vocab_size': 64,
    'model__use_bias': True,
    'train__global_batch_size': 4,
}
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 16), dtype=np.int32)


def with_weights(config, kind, group):
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, weight_quantization=kind, quantization_group_size=group)
    )


def in_codes(params, config):
    """Returns the quantized parameters of a model, and the dequantized parameters in float32."""
    weights = Weights(config.model.weight_quantization, config.model.quantization_group_size)

    @jax.jit
    def run(kernels):
        def both(kernel_L, num_in):
            found = jax.vmap(functools.partial(quantize, num_in=num_in, weights=weights))(kernel_L)
            return found, jax.vmap(lambda x: dequantize(x, num_in, weights.kind, jnp.float32))(found)

        return {path: both(kernels[path], num_in) for path, num_in in quantized_kernels(config.model).items()}

    codes, floats = jax.tree.map(lambda x: x, params), jax.tree.map(lambda x: x, params)

    def module_of(tree, path):
        for key in path.split('.')[:-1]:
            tree = tree[key]
        return tree

    kernels = {path: module_of(params, path)['kernel'] for path in quantized_kernels(config.model)}
    for path, (found, plain) in run(kernels).items():
        module = module_of(codes, path)
        del module['kernel']
        module['kernel_codes'], module['kernel_scales'] = found
        module_of(floats, path)['kernel'] = plain
    return codes, floats


def hidden(config, params, layout=None):
    graph = decoder_graph(config.model) if layout is None else nnx.split(abstract_model(config, layout))[0]
    if layout is not None:
        params = jax.device_put(params, param_shardings(config, layout))
    run = jax.jit(lambda params: nnx.merge(graph, params)(TOKENS)[0])
    return np.asarray(run(params))


@pytest.mark.parametrize(('kind', 'group', 'scan'), [('int8', 0, True), ('int4', 16, True), ('fp8', 0, False)])
def test_a_model_uses_the_dequantized_kernels(kind, group, scan):
    config = small_config(**MODEL, model__scan_layers=scan)
    quantized = with_weights(config, kind, group)
    params = random_params(config)
    codes, floats = in_codes(params, quantized)
    found = hidden(quantized, codes)
    np.testing.assert_allclose(found, hidden(config, floats), atol=2e-5)
    # Negative control: the original kernels give another result.
    assert np.abs(found - hidden(config, params)).max() > 1e-3


def test_layouts_compute_the_same():
    # The width has 3 groups of 12, which do not divide over the devices, so they are replicated.
    settings = {**MODEL, 'model__dim': 36, 'model__head_dim': 8}
    alone = with_weights(small_config(**settings), 'int4', 16)
    config = with_weights(small_config(num_devices=4, **settings, mesh__fsdp=2, mesh__tensor=2), 'int4', 16)
    codes, _ = in_codes(random_params(small_config(**settings)), alone)
    found = hidden(config, codes, small_layout(config))
    expected = hidden(alone, codes)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert expected.std() > 0.1
    specs = param_shardings(config, small_layout(config))['blocks']['feedforward']['up']
    assert (specs['kernel_codes'].spec[1], specs['kernel_scales'].spec[1]) == (('fsdp', 'expert', 'context'), None)
    assert specs['kernel_scales'].spec[2] == 'tensor'
