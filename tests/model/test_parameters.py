"""Tests the parameters of a model, against the state of a run and by hand."""

import dataclasses

import jax
import pytest

from maxlm.model.blocks import Block
from maxlm.model.layers.linear import parameter
from maxlm.model.layers.weight_only_quantization import SCALES
from maxlm.model.parameters import (
    Kernel,
    block_kernels,
    count_active_parameters,
    count_parameters,
    kind_of,
    names,
    parameters_text,
    tables,
    value_elements,
    weights,
)
from maxlm.training.state import abstract_state
from tests.small import LATENT, STREAM, model_keys, small_config, small_layout

EXPERTS = {'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 24}
QLORA = {'model__lora_rank': 3, 'model__weight_quantization': 'int8', 'train__init_from': 'runs/base'}
VALUES = model_keys(family='nanochat', num_kv_heads=2, value_embedding_pattern='NV', value_gate_channels=12)
MODELS = {
    'gpt2': {'model__family': 'gpt2'},
    'latent attention with adapters': {**LATENT, 'model__q_lora_rank': 20, 'model__lora_rank': 3},
    'quantized experts': {'model__family': 'llama', **EXPERTS, **QLORA, 'model__num_dense_layers': 1},
    'multi-token prediction': {'model__family': 'gpt2', 'model__mtp_depth': 2, 'model__lora_rank': 2},
    'value embeddings': VALUES,
    'stream': {'model__family': 'gpt2', **STREAM},
}


@pytest.mark.parametrize('model', MODELS)
def test_counts_equal_the_state_of_a_run(model):
    config = small_config(**MODELS[model])
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state(config, small_layout(config)).params)
    # Scales of quantized kernels are no parameters of their own.
    state = {'.'.join(names(path)): (leaf.size, kind_of(path)) for path, leaf in leaves if names(path)[-1] != SCALES}
    counted = {weight.name: (weight.size, weight.kind) for weight in weights(config.model)}
    assert counted == {name: (size, 'matrix' if kind == 'codes' else kind) for name, (size, kind) in state.items()}
    assert count_parameters(config.model) == sum(size for size, _ in state.values())


def test_options_of_the_stream_are_replicated_vectors():
    plain, found = (small_config(model__num_layers=3, **settings).model for settings in ({}, STREAM))
    added = {weight.name: weight for weight in set(weights(found)) - set(weights(plain))}
    assert {name: weight.size for name, weight in added.items()} == {
        'residual_scales': 3,
        'embedding_scales': 3,
        'smear_gate': 5,
        'smear_scale': 1,
        'backout_scale': 1,
    }
    # Vectors have no weight decay by default, stay in float32 and are trained by AdamW also with Muon.
    assert {(weight.kind, weight.axes) for weight in added.values()} == {('vector', ('norm',))}


def test_matrices_of_a_block_by_hand():
    model = small_config(model__family='llama', model__num_kv_heads=2, **EXPERTS, model__num_shared_experts=2).model
    # Width 32, four heads of 8 dims.
    assert block_kernels(model) == {
        'query': Kernel(32, 32),
        'key': Kernel(32, 16),
        'value': Kernel(32, 16),
        'out': Kernel(32, 32),
        'router': Kernel(32, 4),
        'experts.gate': Kernel(32, 24, 4, 2),
        'experts.up': Kernel(32, 24, 4, 2),
        'experts.down': Kernel(24, 32, 4, 2),
        'shared.gate': Kernel(32, 48),
        'shared.up': Kernel(32, 48),
        'shared.down': Kernel(48, 32),
    }
    assert tables(model) == (61 * 32, 0, 61 * 32, 0)


def test_value_embeddings_by_hand():
    model = small_config(**VALUES).model
    found = {weight.name: weight for weight in weights(model) if weight.name.startswith('value')}
    # One of two layers: 61 ids, 12 channels, two heads of 8 dims.
    assert {name: (weight.shape, weight.kind) for name, weight in found.items()} == {
        'value_embeddings': ((1, 61, 16), 'table'),
        'value_gates': ((1, 12, 2), 'matrix'),
    }
    assert found['value_gates'].matrix_shape == (12, 2)
    assert tables(model).values == 61 * 16
    assert value_elements(model) == 16


class Scaled(Block):
    """A block of a user with a parameter that maxlm does not know."""

    def __init__(self, config, *, partitioning, rngs):
        super().__init__(config, partitioning=partitioning, rngs=rngs)
        self.scale = parameter(rngs, (config.dim,), ('norm',), jax.nn.initializers.ones)


def test_parameters_of_a_block_of_the_user_count():
    model = small_config(model__block=f'{__name__}:Scaled').model
    plain = small_config().model
    assert count_parameters(model) == count_parameters(plain) + plain.num_layers * plain.dim


@pytest.mark.parametrize('key', ['num_layers', 'dim', 'ffn_dim', 'vocab_size', 'num_heads', 'max_positions'])
def test_every_dimension_counts(key):
    model = small_config().model
    larger = dataclasses.replace(model, **{key: 2 * getattr(model, key)})
    assert count_parameters(larger) > count_parameters(model)


def test_active_parameters_are_those_of_a_model_with_the_experts_of_a_token():
    model = small_config(model__family='llama', **EXPERTS, model__num_shared_experts=1).model
    used = dataclasses.replace(model, num_experts=model.num_experts_per_token)
    # The router has a column for every expert.
    router = model.num_layers * model.dim * (model.num_experts - model.num_experts_per_token)
    assert count_active_parameters(model) == count_parameters(used) + router < count_parameters(model)
    numbers = count_parameters(model), count_parameters(used) + router
    assert parameters_text(model) == '{:,} parameters ({:,} active per token)'.format(*numbers)
    dense = small_config(model__family='llama').model
    assert count_active_parameters(dense) == count_parameters(dense)
    assert parameters_text(dense) == f'{count_parameters(dense):,} parameters'
