"""Parameters counted from shapes: against the model's real arrays, in every family."""

import dataclasses

import pytest

from maxlm.planning.sizes import num_parameters
from maxlm.planning.weights import count_parameters
from maxlm.training.state import abstract_state
from tests.small import small_config, small_layout

MODELS = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt2 untied': {'model__family': 'gpt2', 'model__tie_embeddings': False},
    'gpt2 without biases': {'model__family': 'gpt2', 'model__use_bias': False},
    'gpt_neox': {'model__family': 'gpt_neox'},
    'llama': {'model__family': 'llama', 'model__num_layers': 3},
    'llama with biases': {'model__family': 'llama', 'model__use_bias': True},
    'grouped heads': {'model__family': 'qwen3', 'model__num_kv_heads': 2, 'model__head_dim': 24},
    'nanochat': {'model__family': 'nanochat', 'model__ffn_dim': 40},
    'normalized embedding': {'model__family': 'gpt2', 'model__embedding_norm': True, 'model__qk_norm': True},
    'long table': {'model__family': 'gpt2', 'model__max_positions': 48, 'model__vocab_size': 77},
}


@pytest.mark.parametrize('model', MODELS)
def test_as_many_as_the_arrays_have(model):
    config = small_config(**MODELS[model])
    assert count_parameters(config.model) == num_parameters(abstract_state(config, small_layout(config)).params)


@pytest.mark.parametrize('key', ['num_layers', 'dim', 'ffn_dim', 'vocab_size', 'num_heads', 'max_positions'])
def test_every_dimension_counts(key):
    model = small_config().model
    larger = dataclasses.replace(model, **{key: 2 * getattr(model, key)})
    assert count_parameters(larger) > count_parameters(model)
