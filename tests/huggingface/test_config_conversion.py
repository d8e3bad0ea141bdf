"""Tests config.json in both directions against Transformers: round trips, architectures and unsupported values."""

import dataclasses
import json

import pytest
import transformers

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import (
    check_supported,
    choose_architecture,
    from_config,
    to_config,
    unsupported_settings,
)
from maxlm.huggingface.config_fields import Fields
from maxlm.huggingface.original_config import export_config
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.messages import input_error
from tests.small import LATENT, STREAM, model_keys, small_config

# Keys without an equivalent in config.json: they affect training, or how the same function is computed.
FREE = {'init', 'init_std', 'dropout', 'dtype', 'remat', 'scan_layers', 'attention', 'matmul', 'expert_matmul'}
MODELS = {
    'gpt2': model_keys(family='gpt2'),
    'gpt2, other settings': model_keys(
        family='gpt2', tie_embeddings=False, activation='gelu', norm_epsilon=1e-4, ffn_dim=50
    ),
    'gpt2 with squared relu': model_keys(family='gpt2', activation='relu2'),
    'gpt_neox': model_keys(family='gpt_neox'),
    'gpt_neox, other settings': model_keys(
        family='gpt_neox',
        parallel_residual=False,
        partial_rotary_factor=0.5,
        rope_theta=77.0,
        activation='gelu_tanh',
        tie_embeddings=True,
    ),
    'llama': model_keys(family='llama'),
    'llama, other settings': model_keys(
        family='llama', num_kv_heads=2, head_dim=6, use_bias=True, tie_embeddings=True, max_positions=99
    ),
    'mistral': model_keys(family='llama', attention_pattern='S', sliding_window=5),
    'qwen3': model_keys(family='qwen3', head_dim=6),
    'qwen3 in turns': model_keys(family='qwen3', num_layers=5, attention_pattern='SSL', sliding_window=5),
    **{f'{name} with experts': overrides for name, overrides in EXPERT_MODELS.items()},
    'qwen3_moe without normalization': {**EXPERT_MODELS['qwen3_moe'], 'model__router_normalize': False},
    'deepseek_v2, no groups': {**EXPERT_MODELS['deepseek_v2'], 'model__num_expert_groups': 1},
    'deepseek_v3': {**LATENT, 'model__family': 'deepseek_v3', 'model__q_lora_rank': 20},
    'deepseek_v3, full queries, yarn': {
        **LATENT,
        **model_keys(family='deepseek_v3', rope_scaling='yarn', rope_scaling_factor=4.0, rope_mscale_all_dim=0.7),
    },
    'qwen2': model_keys(family='qwen2', head_dim=6),
    'qwen2 in turns': model_keys(family='qwen2', attention_pattern='LS', sliding_window=5),
    'smollm3': model_keys(family='smollm3', num_layers=6),
    'smollm3, other settings': model_keys(
        family='smollm3', attention_pattern='NL', use_bias=True, rope_scaling='yarn', rope_scaling_factor=4.0
    ),
    'starcoder2': model_keys(family='starcoder2', num_kv_heads=2),
    'starcoder2, other settings': model_keys(
        family='starcoder2', attention_pattern='L', sliding_window=0, tie_embeddings=False, rope_theta=77.0, dropout=0.1
    ),
    'olmo2': model_keys(family='olmo2'),
    'olmo3': model_keys(family='olmo3', num_layers=5),
    'olmo3, other settings': model_keys(
        family='olmo3',
        attention_pattern='SL',
        sliding_window=5,
        rope_scaling='yarn',
        rope_scaling_factor=4.0,
        rope_theta=77.0,
        rope_local_theta=77.0,
    ),
    'olmo3 with scaling in all layers': model_keys(
        family='olmo3', attention_pattern='SL', rope_scaling='linear', rope_scaling_factor=4.0, rope_local_theta=0.0
    ),
    'granite': model_keys(family='granite', head_dim=6),
    'granite, other settings': model_keys(
        family='granite', attention_multiplier=0.0, residual_multiplier=1.0, logits_scaling=0.5
    ),
    # Without the Llama that the auto mode prefers.
    'phi3': model_keys(family='phi3', num_kv_heads=2),
    'phi3, other settings': model_keys(
        family='phi3',
        partial_rotary_factor=0.5,
        attention_pattern='S',
        sliding_window=5,
        rope_scaling='longrope',
        rope_scaling_factor=4.0,
        rope_short_factors=(1.0, 1.5),
        rope_long_factors=(2.0, 8.0),
        max_positions=64,
    ),
    'gemma2': model_keys(family='gemma2'),
    'gemma2, other settings': model_keys(
        family='gemma2',
        attention_multiplier=144**-0.5,
        attention_softcap=0.0,
        logit_softcap=0.0,
        attention_pattern='LLS',
        num_layers=4,
    ),
    'gemma3_text': model_keys(family='gemma3', num_layers=8),
    'gemma3_text, other settings': model_keys(
        family='gemma3',
        attention_pattern='SL',
        logit_softcap=5.0,
        rope_local_theta=77.0,
        rope_scaling='linear',
        rope_scaling_factor=8.0,
    ),
    'nanochat': model_keys(family='nanochat', num_kv_heads=2, logit_softcap=7.0),
    'nanochat without a bound': model_keys(family='nanochat', logit_softcap=0.0, head_dim=6),
}


def model_of(name):
    return small_config(**MODELS[name]).model


def architecture_of(name):
    return 'nanochat' if name.startswith('nanochat') else 'auto'


def essentials(model):
    """Returns the keys that determine the model's function."""
    values = dataclasses.asdict(model)
    unused = set()
    if model.position_embedding == 'learned':
        unused = {key for key in values if key.startswith('rotary_')}
    elif model.rope_scaling in ('none', 'linear'):
        unused = {'original_max_positions'}
    return {key: value for key, value in values.items() if key not in FREE | unused}


def in_transformers(config):
    """Returns a config.json after Transformers has read and written it."""
    return json.loads(transformers.AutoConfig.for_model(**config).to_json_string(use_diff=False))


@pytest.mark.parametrize('name', MODELS)
def test_round_trip(name):
    model = model_of(name)
    config = json.loads(json.dumps(to_config(model, architecture_of(name))))
    assert config['model_type'] == name.replace(',', ' ').split()[0]
    assert essentials(from_config(config, 'config.json')) == essentials(model)


@pytest.mark.parametrize('name', MODELS)
def test_round_trip_through_transformers(name):
    model = model_of(name)
    theirs = in_transformers(to_config(model, architecture_of(name)))
    assert essentials(from_config(theirs, 'config.json')) == essentials(model)
    # Control: the converter reads the values that Transformers writes.
    key = 'n_layer' if 'gpt2' in name else 'num_hidden_layers'
    theirs = {**theirs, key: theirs[key] + 1, 'layer_types': None, 'no_rope_layers': None, 'first_k_dense_replace': 99}
    assert from_config(theirs, 'config.json').num_layers == model.num_layers + 1


@pytest.mark.parametrize('kind', ARCHITECTURES)
def test_absent_keys_are_the_defaults_of_transformers(kind):
    # The only required key.
    given = {'model_type': kind, **({'num_experts_per_tok': 6} if kind == 'deepseek_v2' else {})}
    defaults_only = from_config(given, 'config.json')
    theirs = in_transformers(given)
    assert theirs['model_type'] == kind
    assert defaults_only == from_config(theirs, 'config.json')


@pytest.mark.parametrize('kind', ARCHITECTURES)
def test_every_parameter_of_the_table_is_read(kind):
    # A misspelled key in the table would always give its default.
    row, defaults_only = ARCHITECTURES[kind], in_transformers({'model_type': kind})
    for ours, (theirs, _) in (*row.keys.items(), *row.expert_keys.items()):
        # Attention reads this key of all architectures, also without a default.
        assert theirs in defaults_only or theirs in ('head_dim', 'num_experts'), theirs
        assert hasattr(ModelConfig, ours)


def test_the_parameter_dtype_is_the_compute_dtype():
    def dtype(**keys):
        return from_config({'model_type': 'llama', **keys}, 'config.json').dtype

    assert dtype() == dtype(torch_dtype='float32') == dtype(dtype='float32') == 'float32'
    assert dtype(torch_dtype='float16') == dtype(dtype='bfloat16', torch_dtype='float32') == 'bfloat16'


def test_patterns_are_their_shortest_period():
    def pattern(types, **keys):
        sizes = {'model_type': 'qwen3', 'num_hidden_layers': len(types), 'use_sliding_window': True, **keys}
        names = {'S': 'sliding_attention', 'L': 'full_attention'}
        found = from_config({**sizes, 'layer_types': [names[letter] for letter in types]}, 'config.json')
        return found.attention_pattern, found.sliding_window

    assert pattern('LLLL') == ('L', 0)
    assert pattern('SSSS') == ('S', 4096)
    assert pattern('SLSLS', sliding_window=7) == ('SL', 7)
    assert pattern('SSLSSLS') == ('SSL', 4096)
    assert pattern('LLSS') == ('LLSS', 4096)


def test_qwen3_without_a_list_slides_from_a_layer_on():
    config = {'model_type': 'qwen3', 'num_hidden_layers': 4, 'use_sliding_window': True, 'max_window_layers': 3}
    assert from_config(config, 'config.json').attention_pattern == 'LLLS'
    assert from_config({**config, 'use_sliding_window': False}, 'config.json').attention_pattern == 'L'


@pytest.mark.parametrize(
    ('kind', 'legacy', 'local_theta'),
    [
        (
            'gemma3_text',
            {'rope_theta': 9e5, 'rope_local_base_freq': 77.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
            77.0,
        ),
        (
            'olmo3',
            {
                'rope_theta': 500_000,
                'max_position_embeddings': 65_536,
                'rope_scaling': {
                    'rope_type': 'yarn',
                    'factor': 8.0,
                    'original_max_position_embeddings': 8192,
                    'attention_factor': 1.2,
                },
            },
            500_000.0,
        ),
    ],
)
def test_former_keys_of_positions_by_layer_type(kind, legacy, local_theta):
    found = from_config({'model_type': kind, **legacy}, 'config.json')
    assert found == from_config(in_transformers({'model_type': kind, **legacy}), 'config.json')
    assert (found.rope_scaling_factor, found.rope_local_theta) == (8.0, local_theta)


def test_mistral_without_a_window():
    config = {'model_type': 'mistral'}
    assert from_config({**config, 'sliding_window': None}, 'config.json').attention_pattern == 'L'
    model = from_config(config, 'config.json')
    assert (model.attention_pattern, model.sliding_window, model.family) == ('S', 4096, 'llama')


# --- choice of the architecture


@pytest.mark.parametrize(
    ('overrides', 'chosen'),
    [
        (model_keys(family='gpt2'), 'gpt2'),
        (model_keys(family='gpt_neox'), 'gpt_neox'),
        (model_keys(family='llama'), 'llama'),
        (model_keys(family='qwen3'), 'qwen3'),
        # The switches decide, not the name of the family.
        (model_keys(family='qwen3', qk_norm=False), 'llama'),
        (model_keys(family='llama', qk_norm=True), 'qwen3'),
        (model_keys(family='llama', qkv_bias=True), 'qwen2'),
        (model_keys(family='llama', partial_rotary_factor=0.5), 'phi3'),
        (model_keys(family='llama', attention_pattern='NL'), 'smollm3'),
        (model_keys(family='llama', logits_scaling=2.0), 'granite'),
        (model_keys(family='olmo2', attention_pattern='SL', sliding_window=9), 'olmo3'),
        (model_keys(family='gpt2', position_embedding='rotary'), 'gpt_neox'),
        (
            model_keys(family='gpt_neox', partial_rotary_factor=1.0, parallel_residual=False, num_kv_heads=2),
            'starcoder2',
        ),
        (
            model_keys(family='gpt_neox', position_embedding='learned', parallel_residual=False),
            'gpt2',
        ),
        (model_keys(family='llama', attention_pattern='S', sliding_window=9), 'mistral'),
        # Transformers has no Llama whose width is not a multiple of its heads.
        (model_keys(family='llama', dim=30, head_dim=8), 'mistral'),
    ],
)
def test_the_settings_determine_the_architecture(overrides, chosen):
    assert choose_architecture(small_config(**overrides).model).model_type == chosen


@pytest.mark.parametrize(
    ('overrides', 'parts'),
    [
        (
            model_keys(family='nanochat'),
            [
                'model.activation=relu2',
                'model.logit_softcap=15.0',
                'model.embedding_norm=True',
                'model.norm_use_scale=False',
                'GPT-2, GPT-NeoX, Llama, Mistral, Qwen2.5,',
                '--architecture=nanochat',
            ],
        ),
        (model_keys(family='gpt2', use_bias=False), ['model.use_bias=False', 'GPT-2 is the closest']),
        (model_keys(family='gpt2', num_kv_heads=2), ['model.num_kv_heads=2']),
        (model_keys(family='gpt2', head_dim=6), ['model.head_dim=6']),
        (model_keys(family='gpt2', qk_norm=True), ['model.qk_norm=True']),
        (model_keys(family='gpt_neox', partial_rotary_factor=0.3, head_dim=32, dim=128),
         ['model.partial_rotary_factor=0.3']),
        (model_keys(family='gpt_neox', activation='swiglu'), ['model.activation=swiglu']),
        (model_keys(family='llama', partial_rotary_factor=0.5, head_dim=4),
         ['model.partial_rotary_factor=0.5', 'Llama is the closest']),
        (model_keys(family='llama', activation='gelu'), ['model.activation=gelu', 'Llama is the closest']),
        (model_keys(family='llama', parallel_residual=True), ['model.parallel_residual=True']),
        (model_keys(family='llama', logit_softcap=30.0), ['model.logit_softcap=30.0']),
        (
            model_keys(family='llama', attention_pattern='SL', sliding_window=5),
            ['model.attention_pattern=SL'],
        ),
        (model_keys(family='qwen3', use_bias=True), ['model.use_bias=True']),
        (model_keys(family='qwen2', attention_pattern='LN'), ['model.attention_pattern=LN']),
        (model_keys(family='smollm3', attention_pattern='NS', sliding_window=5),
         ['model.attention_pattern=NS']),
        (model_keys(family='olmo2', qk_norm_scope='head'), ['model.qk_norm_scope=head']),
        (model_keys(family='gemma2', embedding_multiplier=2.0), ['model.embedding_multiplier=2.0']),
        (model_keys(family='gemma2', attention_multiplier=0.3), ['model.attention_multiplier=0.3']),
        (model_keys(family='gemma2', rope_local_theta=9.0), ['model.rope_local_theta=9.0']),
        (model_keys(family='phi3', partial_rotary_factor=0.5, head_dim=4), ['model.head_dim=4']),
        (model_keys(family='gpt2', value_embedding_pattern='V'), ['model.value_embedding_pattern=V']),
        (model_keys(family='qwen3', relative_attention_multiplier=1.44), ['model.relative_attention_multiplier=1.44']),
        (
            model_keys(family='granite', relative_attention_multiplier=1.44, attention_multiplier=0.0),
            ['model.relative_attention_multiplier=1.44'],
        ),
    ],
)  # fmt: skip
def test_unsupported_models_are_reported_by_key_and_value(overrides, parts):
    with pytest.raises(InputError) as error:
        to_config(small_config(**overrides).model)
    for part in parts:
        assert part in str(error.value)
    assert ('--architecture=nanochat' in str(error.value)) == (overrides['model__family'] == 'nanochat')


def test_value_embeddings_of_nanochat_are_not_exported():
    model = small_config(**model_keys(family='nanochat', value_embedding_pattern='NV')).model
    with pytest.raises(InputError, match=r'model\.value_embedding_pattern=NV'):
        choose_architecture(model, 'nanochat')


def test_a_requested_architecture_is_not_replaced():
    model = small_config(model__family='llama').model
    assert choose_architecture(model, 'mistral').model_type == 'mistral'
    with pytest.raises(InputError, match=r'model\.qk_norm=False.*Qwen3ForCausalLM.*--architecture'):
        choose_architecture(model, 'qwen3')


@pytest.mark.parametrize('key', STREAM)
def test_no_architecture_expresses_the_options_of_the_stream(key):
    name, plain = key.split('__')[1], small_config(model__family='llama').model
    model = dataclasses.replace(plain, **{name: STREAM[key]})
    setting = f'model.{name}={STREAM[key]}'
    for row in ARCHITECTURES.values():
        assert set(unsupported_settings(model, row)) - set(unsupported_settings(plain, row)) == {setting}
    for architecture in ('auto', 'llama'):
        with pytest.raises(InputError, match=setting):
            choose_architecture(model, architecture)


# --- unsupported values

LLAMA = {'model_type': 'llama', 'num_hidden_layers': 2, 'num_attention_heads': 4, 'hidden_size': 32}
REFUSED = [
    ({}, ['model_type is missing', 'gpt2, gpt_neox, llama']),
    ({'model_type': 'cohere'}, ['model_type=cohere', 'nanochat']),
    ({'model_type': 'dbrx'}, ['model_type=dbrx is not supported', 'mixtral']),
    ({'model_type': 'qwen3_moe', 'decoder_sparse_step': 2}, ['decoder_sparse_step=2', 'only 1 is supported']),
    ({'model_type': 'qwen3_moe', 'mlp_only_layers': [0]}, ['mlp_only_layers=[0]', 'only [] is supported']),
    ({'model_type': 'deepseek_v2'}, ['num_experts_per_tok=0', 'at least 1']),
    (
        {'model_type': 'deepseek_v2', 'topk_method': 'noaux_tc', 'num_experts_per_tok': 6},
        ['topk_method', 'greedy or group_limited_greedy'],
    ),
    ({'model_type': 'gpt_oss', 'swiglu_limit': 5.0}, ['swiglu_limit=5.0', 'only 7.0 is supported']),
    ({**LLAMA, 'num_local_experts': 8}, ['num_local_experts=8', 'llama models have no experts']),
    ({**LLAMA, 'num_experts': 4}, ['num_experts=4']),
    ({**LLAMA, 'n_routed_experts': 2}, ['n_routed_experts=2']),
    ({'model_type': 'deepseek_v3', 'first_k_dense_replace': 61, 'rope_interleave': False}, ['rope_interleave=False']),
    ({'model_type': 'bloom'}, ['bloom', 'ALiBi']),
    ({'model_type': 'falcon', 'alibi': True}, ['falcon', 'ALiBi']),
    ({'model_type': 'falcon', 'alibi': False}, ['model_type=falcon is not supported']),
    ({'model_type': 'mpt', 'attn_config': {'alibi': True}}, ['mpt', 'ALiBi']),
    ({**LLAMA, 'quantization_config': {'bits': 4}}, ['quantization_config']),
    ({**LLAMA, 'quantization_config': {'quant_method': 'awq'}}, ["quant_method='awq'", 'fp8 or mxfp4']),
    ({**LLAMA, 'quantization_config': [4]}, ['quantization_config=[4]', 'JSON object']),
    ({**LLAMA, 'attention_bias': 1}, ['attention_bias=1', 'true or false']),
    ({**LLAMA, 'hidden_act': 'mish'}, ["hidden_act='mish'", 'silu']),
    ({**LLAMA, 'is_causal': False}, ['is_causal=False', 'is_causal=true']),
    ({**LLAMA, 'per_layer_config': {'0': {'hidden_act': 'relu'}}}, ['per_layer_config']),
    ({**LLAMA, 'hidden_act': 7}, ['hidden_act=7', 'string']),
    ({**LLAMA, 'num_hidden_layers': 0}, ['num_hidden_layers=0', 'at least 1']),
    ({**LLAMA, 'num_hidden_layers': '2'}, ["num_hidden_layers='2'", 'an integer']),
    ({**LLAMA, 'num_hidden_layers': 2.0}, ['num_hidden_layers=2.0', 'an integer']),
    ({**LLAMA, 'num_hidden_layers': True}, ['num_hidden_layers=True', 'an integer']),
    ({**LLAMA, 'hidden_size': None}, ['hidden_size=None']),
    ({**LLAMA, 'intermediate_size': -1}, ['intermediate_size=-1']),
    ({**LLAMA, 'rms_norm_eps': 'small'}, ["rms_norm_eps='small'", 'number']),
    ({**LLAMA, 'tie_word_embeddings': 1}, ['tie_word_embeddings=1', 'true or false']),
    ({**LLAMA, 'num_attention_heads': 3}, ['num_attention_heads=3', 'does not divide hidden_size=32']),
    ({**LLAMA, 'num_key_value_heads': 3}, ['num_key_value_heads=3', 'does not divide num_attention_heads=4']),
    ({**LLAMA, 'layer_types': ['sliding_attention'] * 2}, ['layer_types']),
    ({**LLAMA, 'partial_rotary_factor': 0.5, 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
     ['partial_rotary_factor=0.5', 'all dims of a head', 'set it to 1.0']),
    ({'model_type': 'mistral', 'num_hidden_layers': 2, 'layer_types': ['full_attention', 'sliding_attention']},
     ['layer_types', 'mistral']),
    ({'model_type': 'qwen3', 'num_hidden_layers': 1, 'layer_types': ['sliding_attention']},
     ['layer_types', 'requires a window']),
    ({'model_type': 'qwen3', 'num_hidden_layers': 2, 'layer_types': ['full_attention']}, ['layer_types', '2 entries']),
    ({'model_type': 'qwen3', 'num_hidden_layers': 1, 'layer_types': ['chunked_attention']}, ['chunked_attention']),
    ({'model_type': 'qwen3', 'num_hidden_layers': 1, 'layer_types': [['full_attention']]}, ['1 entries']),
    ({'model_type': 'qwen3', 'use_sliding_window': True, 'max_window_layers': '2'}, ["max_window_layers='2'"]),
    ({'model_type': 'gpt2', 'scale_attn_weights': 1}, ['scale_attn_weights=1', 'true or false']),
    ({'model_type': 'gpt2', 'add_cross_attention': True}, ['add_cross_attention=True']),
    ({'model_type': 'gpt2', 'activation_function': 'tanh'}, ["activation_function='tanh'", 'gelu_new']),
    ({'model_type': 'gpt_neox', 'rotary_pct': 0.3}, ['rotary_pct=0.3', 'of 96 head dims']),
    ({'model_type': 'gpt_neox', 'rotary_pct': 5 / 96}, ['rotary_pct=0.05', 'odd']),
    ({'model_type': 'nanochat', 'attention_bias': True}, ['attention_bias=True']),
    ({'model_type': 'qwen2', 'num_hidden_layers': 1, 'layer_types': ['sliding_attention']},
     ['layer_types', 'requires a window']),
    ({'model_type': 'smollm3', 'num_hidden_layers': 2, 'no_rope_layers': [1]}, ['no_rope_layers=[1]', '2 entries']),
    ({'model_type': 'smollm3', 'no_rope_layers': 'all'}, ['no_rope_layers', '36 entries']),
    ({'model_type': 'smollm3', 'use_sliding_window': True}, ['use_sliding_window=True']),
    ({'model_type': 'smollm3', 'layer_types': ['sliding_attention']}, ['layer_types', 'full_attention']),
    ({'model_type': 'olmo3', 'rope_parameters': {'sliding_attention': {'rope_type': 'yarn'}}},
     ['sliding_attention', "rope_type='yarn'", 'default']),
    ({'model_type': 'olmo3', 'rope_parameters': {'full_attention': 7}}, ['rope_parameters', 'JSON objects']),
    ({'model_type': 'phi3', 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
     ["type='linear'", 'default or longrope']),
    ({'model_type': 'phi3', 'rope_scaling': {'type': 'longrope', 'short_factor': [1.0]}}, ['long_factor', 'list']),
    ({'model_type': 'phi3', 'rope_scaling': {'type': 'longrope', 'short_factor': [1.0], 'long_factor': [1.0]}},
     ['short_factor has 1 values', 'set 48']),
    ({'model_type': 'gemma2', 'sliding_window': None}, ['sliding_window']),
    ({'model_type': 'gemma2', 'use_bidirectional_attention': True}, ['use_bidirectional_attention=True']),
    ({'model_type': 'gemma3_text', 'use_bidirectional_attention': True}, ['use_bidirectional_attention=True']),
    ({'model_type': 'gemma3_text', 'attn_logit_softcapping': 5.0}, ['attn_logit_softcapping=5.0']),
    ({'model_type': 'gemma3'}, ['model_type=gemma3 is not supported']),
    ({'model_type': 'smollm3', 'layer_types': 7}, ['layer_types=7', 'full_attention']),
    ({'model_type': 'olmo3', 'rope_scaling': {'type': 'linear', 'factor': 2.0}, 'rope_parameters': 5},
     ['rope_parameters=5', 'JSON object']),
    ({'model_type': 'mistral', 'sliding_window': -3}, ['sliding_window=-3', 'at least 1']),
    ({'model_type': 'mistral', 'sliding_window': '4096'}, ["sliding_window='4096'", 'an integer']),
    ({**LLAMA, 'dtype': 'pickle'}, ["dtype='pickle'", 'float32, bfloat16']),
    ({**LLAMA, 'torch_dtype': 16}, ['torch_dtype=16', 'a string']),
    *(({**LLAMA, key: value}, [f'{key}=', 'at least -1'])
      for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')
      for value in ('1', 1.0, True, [['a']], {}, -2, 2**31)),
    ({**LLAMA, 'bos_token_id': [1]}, ['bos_token_id=[1]']),
    ({**LLAMA, 'eos_token_id': list(range(65))}, ['a list of at most 64 such numbers']),
]  # fmt: skip


@pytest.mark.parametrize(('config', 'parts'), REFUSED, ids=[', '.join(parts[:1]) for _, parts in REFUSED])
def test_unsupported_values_are_refused_by_name(config, parts):
    with input_error('DIR/config.json', *parts):
        from_config(config, 'DIR/config.json')


def test_ids_and_dtypes_of_published_models_are_read():
    for ids in ({'eos_token_id': [1, 106]}, {'eos_token_id': None, 'pad_token_id': -1}, {'bos_token_id': 50_256}):
        assert from_config({**LLAMA, **ids}, 'x') == from_config(LLAMA, 'x')
    for dtype in ('bfloat16', 'torch.bfloat16', 'float16'):
        assert from_config({**LLAMA, 'torch_dtype': dtype}, 'x').dtype == 'bfloat16'
    assert from_config({**LLAMA, 'dtype': None}, 'x').dtype == 'float32'


def test_values_that_are_ignored_are_logged(caplog):
    with caplog.at_level('WARNING', logger='maxlm'):
        model = from_config({**LLAMA, 'sliding_window': -3, 'n_group': 2}, 'IGNORED/config.json')
    assert model == from_config(LLAMA, 'x')
    assert caplog.messages == [
        'IGNORED/config.json: sliding_window=-3 is not an integer of at least 1 and at most 2147483647; llama models '
        'ignore the key in Transformers, and so does maxlm'
    ]


def test_custom_code_is_ignored_for_supported_models(caplog):
    code = {'auto_map': {'AutoModelForCausalLM': 'modeling.Model'}}
    with caplog.at_level('WARNING', logger='maxlm'):
        check_supported(Fields({**LLAMA, **code}, 'CODE/config.json'), ARCHITECTURES)
    assert [message.split(',')[0] for message in caplog.messages] == ['CODE/config.json: auto_map names custom code']
    with pytest.raises(InputError, match='model_type=other is not supported'):
        check_supported(Fields({**code, 'model_type': 'other'}, 'x'), ARCHITECTURES)
    # The export has no such file.
    model, row = from_config({**LLAMA, **code}, 'x'), ARCHITECTURES['llama']
    exported = export_config({**LLAMA, **code, 'kept': 1}, model, row, ids={}, dtype='float32', is_trained=False)
    assert exported['kept'] == 1
    assert 'auto_map' not in exported


def test_the_table_of_refusals_can_fail():
    assert from_config(LLAMA, 'DIR/config.json').num_layers == 2
    # Harmless keys of other versions.
    harmless = {'pretraining_tp': 2, 'num_experts': 0, 'auto_map': None, 'quantization_config': None, 'use_cache': True}
    assert from_config({**LLAMA, **harmless}, 'config.json') == from_config(LLAMA, 'config.json')
    gpt2 = {'model_type': 'gpt2'}
    assert from_config({**gpt2, 'reorder_and_upcast_attn': True}, 'x') == from_config(gpt2, 'x')
