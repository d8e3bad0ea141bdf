"""Tests parameter counts from shapes against the model's real arrays, in every family."""

import dataclasses

import jax
import pytest
from flax import nnx

from maxlm.model.parameters import count_active_parameters, count_parameters, parameters_text, weights
from maxlm.training.optimizers.optimizer import kind_of, names
from maxlm.training.state import abstract_model, abstract_state
from tests.small import LATENT, small_config, small_layout

EXPERTS = {'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 24}
MODELS = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt2 untied': {'model__family': 'gpt2', 'model__tie_embeddings': False},
    'gpt2 without biases': {'model__family': 'gpt2', 'model__use_bias': False},
    'gpt_neox': {'model__family': 'gpt_neox'},
    'llama': {'model__family': 'llama', 'model__num_layers': 3},
    'llama with biases': {'model__family': 'llama', 'model__use_bias': True},
    'grouped heads': {'model__family': 'qwen3', 'model__num_kv_heads': 2, 'model__head_dim': 24},
    'latent attention': LATENT,
    'latent attention with adapters': {**LATENT, 'model__q_lora_rank': 20, 'model__lora_rank': 3},
    'sinks': {'model__family': 'llama', 'model__attention_sinks': True, 'model__activation': 'swiglu_oai'},
    'nanochat': {'model__family': 'nanochat', 'model__ffn_dim': 40},
    'qwen2': {'model__family': 'qwen2', 'model__num_kv_heads': 2},
    'olmo2': {'model__family': 'olmo2', 'model__num_kv_heads': 2, 'model__head_dim': 24},
    'gemma2': {'model__family': 'gemma2', 'model__num_kv_heads': 2},
    'starcoder2': {'model__family': 'starcoder2', 'model__num_kv_heads': 2},
    'normalized embedding': {'model__family': 'gpt2', 'model__embedding_norm': True, 'model__qk_norm': True},
    'adapters': {'model__family': 'llama', 'model__lora_rank': 3},
    'some adapters': {'model__family': 'gpt2', 'model__lora_rank': 2, 'model__lora_target_modules': ('attention.*',)},
    'experts': {'model__family': 'llama', **EXPERTS},
    'experts with biases': {
        'model__family': 'gpt2',
        **EXPERTS,
        'model__router_use_bias': True,
        'model__router_balance_bias': True,
    },
    'shared experts': {'model__family': 'qwen3', **EXPERTS, 'model__num_shared_experts': 2},
    'first dense layers': {
        'model__family': 'llama',
        **EXPERTS,
        'model__num_shared_experts': 1,
        'model__num_layers': 3,
        'model__num_dense_layers': 1,
        'model__lora_rank': 2,
    },
    'multi-token prediction': {'model__family': 'gpt2', 'model__mtp_depth': 2, 'model__lora_rank': 2},
    'long table': {'model__family': 'gpt2', 'model__max_positions': 48, 'model__vocab_size': 77},
}


@pytest.mark.parametrize('model', MODELS)
def test_counts_equal_the_parameters_of_the_model(model):
    config = small_config(**MODELS[model])
    layout = small_layout(config)
    _, variables = nnx.split(abstract_model(config, layout))
    wanted = {'.'.join(map(str, path)): (tuple(v.shape), v.axes) for path, v in nnx.to_flat_state(variables)}
    assert {weight.name: (weight.shape, weight.axes) for weight in weights(config.model)} == wanted
    tree = abstract_state(config, layout).params
    kinds = {'.'.join(names(path)): kind_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    assert {weight.name: weight.kind for weight in weights(config.model)} == kinds
    assert count_parameters(config.model) == sum(leaf.size for leaf in jax.tree.leaves(tree))


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
