"""Training of adapters beside quantized kernels: gradients, frozen codes, layouts and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.model.parameters import block_kernels
from maxlm.planning.estimate.state_bytes import state_bytes
from maxlm.training.compile import compile_train_step
from maxlm.training.gradients import make_gradients
from maxlm.training.optimizers.trainable import check_patterns, is_trained, param_paths
from maxlm.training.state import abstract_state
from tests.adapters import adapter_arrays, with_arrays
from tests.parameters import random_params
from tests.quantized_kernels import dequantized, quantized
from tests.small import EXPERTS, LATENT, small_batch, small_config, small_layout

LORA = {'model__family': 'llama', 'model__num_kv_heads': 2, 'model__lora_rank': 3, 'train__init_from': 'runs/base'}
LORA |= {'model__vocab_size': 64}


def plain_of(settings):
    return small_config(**{**settings, 'model__weight_quantization': 'float'})


def params_of(settings):
    """Returns quantized parameters with adapters that are not 0, and the same model with the dequantized kernels."""
    config = small_config(**settings)
    params = random_params(plain_of(settings), std=0.1)
    codes = quantized(with_arrays(params, adapter_arrays(config.model)), config.model)
    return jax.device_get((codes, dequantized(codes, config.model)))


def gradients_of(config, params, num_devices=1):
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    values = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), params, abstract.params)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)._replace(params=values)
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    run = jax.jit(make_gradients(config, layout))
    (losses, *_), gradients, _ = run(state, batch, jax.random.key(0), None)
    return float(jnp.sum(losses)), jax.device_get(gradients)


def assert_close(found, expected, rtol=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, gradient), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(gradient, other, rtol=0, atol=rtol * np.abs(other).max(), err_msg=str(path))
        assert np.abs(gradient).max() > 1e-4, path


MODELS = {
    'int8': {**LORA, 'model__weight_quantization': 'int8'},
    'int4 and the embedding': {
        **LORA,
        'model__weight_quantization': 'int4',
        'optimizer__trainable_params': ('embedding',),
        'train__per_device_batch_size': 4,
    },
    'fp8, some adapters, recomputed': {
        **LORA,
        'model__weight_quantization': 'fp8',
        'model__lora_target_modules': ('*.query', '*.down'),
        'model__remat_policy': 'full',
    },
    'latent attention': {**LORA, **LATENT, 'model__num_kv_heads': 0, 'model__weight_quantization': 'int8'},
    'experts': {**LORA, **EXPERTS, 'model__weight_quantization': 'int4'},
}


@pytest.mark.parametrize('settings', MODELS.values(), ids=MODELS)
def test_gradients_equal_those_of_lora_on_dequantized_kernels(settings):
    codes, floats = params_of(settings)
    loss, gradients = gradients_of(small_config(**settings), codes)
    expected_loss, expected = gradients_of(plain_of(settings), floats)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(gradients, expected)


LAYOUTS = [
    {'mesh__fsdp': 2, 'mesh__tensor': 2},
    {'mesh__stage': 2, 'mesh__fsdp': 2, 'train__per_device_batch_size': 1, 'model__remat_policy': 'full'},
    # Gradients are reduced once, and codes are gathered once.
    {'mesh__fsdp': 4, 'mesh__zero_stage': 1, 'model__scan_layers': False},
    # Two inputs per device do not divide the groups of 32 inputs.
    {'mesh__fsdp': 4, 'model__quantization_group_size': 32},
    {**EXPERTS, 'mesh__expert': 2, 'mesh__tensor': 2},
]


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_every_layout_equals_one_device(layout):
    settings = {**LORA, 'model__weight_quantization': 'int4', 'model__quantization_group_size': 8}
    settings |= {key: value for key, value in layout.items() if key.startswith('model__')}
    codes, _ = params_of(settings)
    expected_loss, expected = gradients_of(small_config(**settings), codes)
    loss, gradients = gradients_of(small_config(num_devices=4, **{**settings, **layout}), codes)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(gradients, expected, rtol=1e-4)


def test_shardings_of_codes_and_scales():
    settings = {**LORA, 'model__weight_quantization': 'int4', 'model__quantization_group_size': 32}
    config = small_config(num_devices=4, **settings, mesh__fsdp=2, mesh__tensor=2)
    query = abstract_state(config, small_layout(config)).params['blocks']['attention']['query']
    assert query['kernel_codes'].sharding.shard_shape((2, 16, 4, 8)) == (2, 8, 2, 8)
    # The only group of inputs is replicated.
    assert query['kernel_scales'].sharding.shard_shape((2, 1, 4, 8)) == (2, 1, 2, 8)


def compiled_bytes(**overrides):
    """Returns the bytes of parameters, arguments and temporary arrays of the compiled step."""
    sizes = {'model__dim': 128, 'data__seq_len': 8, 'train__global_batch_size': 1, 'optimizer__weight_decay': 0.0}
    config = small_config(**{**LORA, **sizes, **overrides})
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    analysis = compile_train_step(config, layout, abstract).step.memory_analysis()
    return state_bytes(abstract).parameters, analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


def test_the_compiled_step_has_no_float_kernels():
    plain, plain_arguments, few_plain = compiled_bytes()
    stored, arguments, few = compiled_bytes(model__weight_quantization='int8')
    assert plain - stored == pytest.approx(plain_arguments - arguments, abs=64)
    assert stored < 0.4 * plain
    # The backward pass does not keep the dequantized kernels of all layers.
    model = small_config(**LORA, model__dim=128).model
    of_four_layers = 4 * 4 * sum(kernel.size for kernel in block_kernels(model).values())
    _, _, many = compiled_bytes(model__weight_quantization='int8', model__num_layers=6)
    assert many - few < 0.8 * of_four_layers
    # Negative control: without rematerialization, the step of LoRA copies the kernels.
    _, _, many_plain = compiled_bytes(model__num_layers=6)
    assert many_plain - few_plain > of_four_layers


def test_patterns_of_trained_parameters():
    settings = {**LORA, 'model__weight_quantization': 'int8'}
    config = small_config(**settings, optimizer__trainable_params=('blocks', 'head'))
    names = list(param_paths(abstract_state(config, small_layout(config)).params))
    trained = {name for name in names if is_trained(config, name)}
    assert {'head.kernel', 'blocks.attention_norm.scale', 'blocks.attention.query.lora_a'} <= trained
    assert {name.rpartition('.')[2] for name in names if name not in trained} == {
        'embedding',
        'scale',
        'kernel_codes',
        'kernel_scales',
    }
    refused = small_config(**settings, optimizer__trainable_params=('*.kernel_codes',))
    with pytest.raises(InputError, match='matches only quantized kernels'):
        check_patterns(refused, names)
