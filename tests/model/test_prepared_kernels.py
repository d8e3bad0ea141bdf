"""Kernels in the form for decoding: transposed, and joined with those of the same input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import Decoder
from maxlm.model.layers import linear
from maxlm.model.layers.linear import fused_apply
from maxlm.model.layers.weight_only_quantization import Weights, dequantize, quantize
from maxlm.model.prepared_kernels import convert, prepare_modules
from maxlm.parallel.partitioning import SINGLE_DEVICE, SingleDevice
from tests.model.layers.test_linear import Split
from tests.small import small_config

GROUPS = {
    (BLOCKS, 'attention'): ('query', 'key', 'value'),
    (BLOCKS, 'feedforward'): ('gate', 'up'),
}


# Partitioning of one GPU.
GPU = SingleDevice(device_platform='gpu')


def new_decoder(partitioning=GPU, **changes):
    config = dataclasses.replace(small_config(model__family='qwen2').model, **changes)
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), partitioning=partitioning))


def layer_of(decoder, rng):
    """Returns random parameters of one layer, with codes of kernels if they are quantized."""

    def random(path, x):
        name = path[-1].key
        if name == 'kernel_codes':
            return rng.integers(0, 255, x.shape[1:]).astype(np.uint8).view(x.dtype)
        return rng.standard_normal(x.shape[1:], np.float32).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(random, nnx.to_pure_dict(nnx.state(decoder.blocks)))


def merged(decoder, layer):
    graph, _ = nnx.split(decoder.blocks)
    return nnx.merge(graph, layer)


def numpy_kernel(params, weights):
    """Returns the kernel [in, outputs] of a projection with one input axis."""
    if weights is None:
        kernel = params['kernel']
    else:
        stored = quantize(jnp.zeros((1, 1)), 1, Weights('int8', 0))._replace(
            codes=params['kernel_codes'], scales=params['kernel_scales']
        )
        kernel = np.asarray(dequantize(stored, 1, weights, jnp.float32))
    return kernel.reshape(len(kernel), -1)


@pytest.mark.parametrize('weights', [None, 'int8', 'int4'])
def test_joined_projections_equal_products_in_numpy(weights):
    changes = {} if weights is None else {'weight_quantization': weights}
    decoder, rng = new_decoder(**changes), np.random.default_rng(0)
    layer = layer_of(decoder, rng)
    form = prepare_modules(decoder)
    assert form.joined == GROUPS
    block = merged(decoder, convert(layer, form, (BLOCKS,)))
    for (_, name), projections in GROUPS.items():
        module, params = getattr(block, name), layer[name]
        x = rng.standard_normal((2, 3, decoder.config.dim), np.float32)
        found = fused_apply([getattr(module, projection) for projection in projections], x)
        for projection, y in zip(projections, found, strict=True):
            bias = params[projection].get('bias', np.zeros(1))
            expected = x @ numpy_kernel(params[projection], weights) + bias.reshape(-1)
            np.testing.assert_allclose(y.reshape(2, 3, -1), expected, rtol=2e-5, atol=1e-4)
            # Negative control: the order of the outputs matters.
            assert np.abs(y.reshape(2, 3, -1)[..., ::-1] - expected).max() > 0.1
    # Each byte is kept once.
    kept = sum(x.nbytes for x in jax.tree.leaves(convert(layer, form, (BLOCKS,))))
    assert kept == sum(x.nbytes for x in jax.tree.leaves(layer))


@pytest.mark.parametrize(
    ('partitioning', 'changes', 'joined'),
    [
        (Split(device_platform='gpu'), {}, {'feedforward'}),
        (SINGLE_DEVICE, {}, set()),
        (GPU, {'lora_rank': 2, 'lora_target_modules': ('*.up',)}, {'attention'}),
        (GPU, {'matmul_precision': 'fp8'}, set()),
        (GPU, {'block': 'maxlm.model.blocks:Block'}, set()),
    ],
)
def test_kernels_that_stay_separate(partitioning, changes, joined):
    form = prepare_modules(new_decoder(partitioning, **changes))
    assert {path[-1] for path in form.joined} == joined


def test_a_product_of_one_row_on_a_gpu_is_summed_in_float32():
    rng = np.random.default_rng(0)
    kernel_OI, x_1I = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((5, 512), (1, 512)))
    expected = np.asarray(x_1I, np.float64) @ np.asarray(kernel_OI, np.float64).T
    found = linear.transposed_matmul(x_1I, kernel_OI, jnp.float32, platform='gpu')
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    # Negative control: terms in bfloat16 would differ.
    rounded = np.asarray((kernel_OI * x_1I).astype(jnp.float32).sum(axis=1))
    assert np.abs(rounded - expected).max() > 1e-2
