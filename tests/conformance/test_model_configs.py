"""Tests that keys of config.json change logits as in Transformers, and that an export writes them again."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import from_config, to_config
from tests.conftest import ROOT
from tests.huggingface.test_round_trip import export, our_texts, their_texts
from tests.huggingface.transformers_models import Case, make_model, to_maxlm
from tests.huggingface.workdirs import make_workdir
from tests.model.test_parity import our_logits
from tests.model.transformers_logits import BATCH, their_logits

TOLERANCE = 1e-4
_LLAMA = {
    'vocab_size': 61,
    'max_position_embeddings': 64,
    'hidden_size': 32,
    'intermediate_size': 56,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'pad_token_id': None,
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != 'num_key_value_heads'}
_GPT2 = {'vocab_size': 61, 'n_positions': 64, 'n_embd': 32, 'n_layer': 3, 'n_head': 4}
_EXPERTS = {'head_dim': 8, 'num_local_experts': 4, 'num_experts': 4, 'num_experts_per_tok': 2}
_SIZES = {
    'gpt2': _GPT2,
    'gpt_neox': _NEOX,
    'gemma2': {**_LLAMA, 'head_dim': 8},
    'gemma3_text': {**_LLAMA, 'head_dim': 8},
    'qwen3': {**_LLAMA, 'head_dim': 8},
    'gpt_oss': {**_LLAMA, **_EXPERTS, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 100.0}},
    'qwen3_moe': {**_LLAMA, **_EXPERTS, 'moe_intermediate_size': 24},
    'mixtral': {**_LLAMA, **_EXPERTS},
}
# Settings that differ from the default of an architecture.
SETTINGS = [
    ('llama', {'attention_bias': True}),
    ('llama', {'mlp_bias': True}),
    ('smollm3', {'attention_bias': True}),
    ('granite', {'mlp_bias': True, 'attention_multiplier': 0.2}),
    ('qwen3', {'attention_bias': True}),
    ('olmo2', {'attention_bias': True}),
    ('olmo3', {'attention_bias': True}),
    ('gemma2', {'attention_bias': True}),
    ('gemma3_text', {'attention_bias': True}),
    ('qwen3_moe', {'attention_bias': True}),
    ('gpt_oss', {'attention_bias': False}),
    ('gpt_neox', {'attention_bias': False}),
    ('starcoder2', {'use_bias': False}),
    ('llama', {'hidden_act': 'gelu'}),
    ('llama', {'hidden_act': 'gelu_pytorch_tanh'}),
    ('llama', {'hidden_act': 'relu'}),
    ('mistral', {'hidden_act': 'relu'}),
    ('qwen2', {'hidden_act': 'gelu'}),
    ('qwen3', {'hidden_act': 'gelu'}),
    ('phi3', {'hidden_act': 'gelu_pytorch_tanh'}),
    ('gemma2', {'hidden_activation': 'gelu'}),
    ('gemma3_text', {'hidden_activation': 'silu'}),
    ('mixtral', {'hidden_act': 'relu'}),
    ('gpt2', {'activation_function': 'relu'}),
    ('gpt2', {'activation_function': 'silu'}),
    ('gpt_neox', {'hidden_act': 'relu'}),
    ('starcoder2', {'hidden_act': 'relu'}),
    ('nanochat', {'hidden_act': 'relu'}),
    ('gpt2', {'scale_attn_weights': False}),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True, 'scale_attn_weights': False}),
]


def case_of(model_type, settings):
    return Case(model_type, {**_SIZES.get(model_type, _LLAMA), **settings})


def worst_difference(model, theirs):
    config, params = to_maxlm(model)
    return np.abs(our_logits(config, BATCH)(params) - theirs)[BATCH['segments'] > 0].max()


@pytest.mark.parametrize(('model_type', 'settings'), SETTINGS, ids=str)
def test_logits_and_keys_agree_with_transformers(model_type, settings):
    model = make_model(case_of(model_type, settings))
    values = model.config.to_dict()
    config = from_config(values, 'config.json')
    with torch.no_grad():
        theirs = their_logits(model, BATCH, config).numpy()
    assert theirs.std() > 0.3, 'logits near zero would agree with anything'
    assert worst_difference(model, theirs) <= TOLERANCE
    written = to_config(config, model_type)
    assert {key: written[key] for key in settings} == settings
    assert from_config(written, 'config.json') == config
    # Control: the default gives another model.
    default = make_model(case_of(model_type, {}))
    assert from_config(default.config.to_dict(), 'config.json') != config
    with torch.no_grad():
        assert np.abs(their_logits(default, BATCH, config).numpy() - theirs).max() > 10 * TOLERANCE


@pytest.mark.parametrize('model_type', ['llama', 'qwen2', 'granite', 'gemma3_text'])
def test_a_fraction_of_rotated_dims_that_transformers_ignores(model_type):
    """Transformers rotates whole heads in these models."""
    model = make_model(case_of(model_type, {'partial_rotary_factor': 0.5}))
    values = {**model.config.to_dict(), 'partial_rotary_factor': 0.5}
    config = from_config(values, 'config.json')
    with torch.no_grad():
        assert worst_difference(model, their_logits(model, BATCH, config).numpy()) <= TOLERANCE
    assert config.partial_rotary_factor == 1


def test_other_names_of_keys():
    names = {'hidden_size': 32, 'num_hidden_layers': 3, 'num_attention_heads': 4, 'max_position_embeddings': 64}
    aliased = {'model_type': 'gpt2', 'vocab_size': 61, **names}
    assert from_config(aliased, 'config.json') == from_config({'model_type': 'gpt2', **_GPT2}, 'config.json')


@pytest.mark.slow
def test_scores_scaled_by_layer_generate_the_same_text(tmp_path):
    """Compares greedy texts, for which maxlm runs layers with caches."""
    tokenizer = train_bpe([(ROOT / 'LICENSE').read_text()], 300)
    overrides = {'model__family': 'gpt2', 'model__vocab_size': tokenizer.vocab_size}
    scaled = {**overrides, 'model__attention_scale_by_layer': True, 'model__attention_multiplier': 1.0}
    make_workdir(tmp_path / 'ours', scaled, tokenizer=tokenizer)
    make_workdir(tmp_path / 'other', overrides, tokenizer=tokenizer)
    theirs = their_texts(export(tmp_path / 'ours', tmp_path / 'theirs'))
    assert our_texts(tmp_path / 'ours') == theirs
    # Control: the same weights without the settings.
    assert our_texts(tmp_path / 'other') != theirs


# Keys without an effect on the logits of a causal language model in Transformers.
IRRELEVANT = {
    *('architectures', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'use_cache', 'initializer_range', 'dtype'),
    *('attention_dropout', 'attn_pdrop', 'embd_pdrop', 'resid_pdrop', 'hidden_dropout', 'residual_dropout'),
    *('embedding_dropout', 'classifier_dropout', 'router_jitter_noise', 'router_aux_loss_coef', 'output_router_logits'),
    *('pretraining_tp', 'reorder_and_upcast_attn', 'is_decoder', 'num_mtp_layers', 'num_nextn_predict_layers'),
    *('summary_type', 'summary_use_proj', 'summary_activation', 'summary_proj_to_labels', 'summary_first_dropout'),
    # Only models with scaled positions read it.
    'original_max_position_embeddings',
}
# Other keys that have an effect only beside a switch.
SWITCHES = {
    'use_sliding_window': {'sliding_window': 4, 'max_window_layers': 0, 'layer_types': None},
    'num_experts': {'num_local_experts': None},
    'sliding_window': {'use_sliding_window': True, 'max_window_layers': 0, 'layer_types': None},
    'max_window_layers': {'use_sliding_window': True, 'layer_types': None},
    'no_rope_layer_interval': {'no_rope_layers': None},
    'n_group': {'topk_method': 'group_limited_greedy', 'topk_group': 1},
    'topk_group': {'topk_method': 'group_limited_greedy', 'n_group': 2},
}
_DEEPSEEK = {
    'kv_lora_rank': 20,
    'qk_nope_head_dim': 10,
    'qk_rope_head_dim': 6,
    'v_head_dim': 12,
    'n_routed_experts': 8,
    'num_experts_per_tok': 3,
    'n_group': 2,
    'topk_group': 1,
    'first_k_dense_replace': 1,
}


def outcome(values):
    """Returns the model of a config.json, or the error."""
    try:
        return from_config(values, 'config.json')
    except InputError as error:
        return str(error)


def other_values(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2, value / 2 + 0.25]
    if isinstance(value, str):
        return ['relu', 'tanh']
    if isinstance(value, list):
        return [[*reversed(value)], [0], ['sliding_attention'] * len(value)]
    if isinstance(value, dict):
        return [{**value, 'rope_theta': 3.0}, {'full_attention': {'rope_theta': 3.0}}]
    return [True, 4, [1], 5.0]


@pytest.mark.parametrize('model_type', ARCHITECTURES)
def test_every_key_of_transformers_is_read_refused_or_irrelevant(model_type):
    sizes = {**_SIZES.get(model_type, _LLAMA), **(_DEEPSEEK if 'deepseek' in model_type else {})}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    keys = {field.name for field in dataclasses.fields(config)} - common
    assert len(keys) > 10
    ignored = set()
    for key in keys - IRRELEVANT | {'is_causal', 'per_layer_config', 'tie_word_embeddings'}:
        values = {**config.to_dict(), **SWITCHES.get(key, {})}
        values = {name: value for name, value in values.items() if value is not None}
        changed = [outcome({**values, key: value}) for value in other_values(getattr(config, key, None))]
        # An error without a change is the refusal of the switch.
        if not isinstance(outcome(values), str) and all(result == outcome(values) for result in changed):
            ignored.add(key)
    # All heads of latent attention have keys of their own.
    assert ignored <= ({'num_key_value_heads', 'head_dim'} if 'deepseek' in model_type else set())
    # Control: an unknown key is ignored.
    assert outcome({**config.to_dict(), 'unknown': True}) == outcome(config.to_dict())
    assert not isinstance(outcome(config.to_dict()), str)
