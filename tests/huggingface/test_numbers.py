"""Tests that invalid numbers in config.json and generation_config.json give a model or one error line."""

import json
import time

import pytest

from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import from_config
from maxlm.huggingface.config_fields import display_value
from maxlm.huggingface.nanochat.model_versions import KEYS
from maxlm.huggingface.numbers import NUMBERS
from maxlm.huggingface.tokenizer_files import files_for_import

VALUES = [
    *(float('inf'), float('-inf'), float('nan'), 0, -1, 1, 1e6, 10**6, 1e30, 10**9, 10**30, -(10**30), 0.5, 1e-320),
    *('7', 'x' * 10_000, True, [], [1], {}, None),
]
ROPE = {
    'yarn': {'factor': 4.0, 'original_max_position_embeddings': 512, 'beta_slow': 1.0, 'beta_fast': 32.0},
    'yarn, attention': {'factor': 4.0, 'attention_factor': 1.1},
    'yarn, mscale': {'factor': 4.0, 'mscale': 0.7, 'mscale_all_dim': 1.3},
    'llama3': {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0},
    'dynamic': {'factor': 2.0, 'rope_theta': 10_000.0, 'partial_rotary_factor': 1.0},
}
EXPERTS = dict.fromkeys(('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts'), 0)
IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
GIVEN = {
    'gpt2': {'n_layer': 2, 'n_head': 4, 'n_embd': 32, 'n_inner': 64, 'n_positions': 64},
    'gpt_neox': {'num_hidden_layers': 2, 'rotary_pct': 0.25, 'rotary_emb_base': 10_000},
    'llama': {'head_dim': 8, 'num_key_value_heads': 2, 'rope_theta': 10_000.0, **EXPERTS},
    'mistral': {'sliding_window': 64},
    'qwen3': {'use_sliding_window': True, 'max_window_layers': 1, 'num_hidden_layers': 2},
    'qwen2': {'use_sliding_window': True, 'max_window_layers': 1, 'num_hidden_layers': 2},
    'smollm3': {'no_rope_layer_interval': 2},
    'olmo2': {},
    'olmo3': {'sliding_window': 64},
    'granite': {},
    'phi3': {'sliding_window': 64},
    'gemma2': {},
    'gemma3_text': {'rope_local_base_freq': 1000.0, 'sliding_window_pattern': 3, 'final_logit_softcapping': 5.0},
    'mixtral': {'sliding_window': 64},
    'qwen3_moe': {},
    'deepseek_v2': {'num_hidden_layers': 2, 'num_experts_per_tok': 3, 'topk_method': 'group_limited_greedy'},
    'deepseek_v3': {'num_hidden_layers': 2, 'first_k_dense_replace': 1},
    'gpt_oss': {'sliding_window': 64, 'hidden_size': 4096},
    'starcoder2': {'sliding_window': 64},
    'nanochat': {'final_logit_softcapping': 15.0},
}


def defaults(kind):
    """Returns a config.json of an architecture with every number of its table."""
    row = ARCHITECTURES[kind]
    keys = (*row.keys.values(), *row.expert_keys.values())
    return {'model_type': kind, **{theirs: value for theirs, value in keys if value is not None}, **GIVEN[kind]}


def check(change, key, value):
    """Reads a changed config: it is valid, or the error names the file, the key, the value and the expected range."""
    before = time.process_time()
    try:
        from_config(change, 'DIR/config.json')
    except InputError as error:
        message = str(error)
    else:
        assert value is None or value in NUMBERS[key], (key, value)
        return
    assert time.process_time() - before < 1
    assert message.startswith('DIR/config.json: ')
    assert '\n' not in message
    assert len(message) < 500
    if value not in NUMBERS[key]:
        assert f'{key}={display_value(value)}: must be {NUMBERS[key]}' in message


@pytest.mark.parametrize('kind', ARCHITECTURES)
def test_numbers_of_a_config(kind):
    config = defaults(kind)
    from_config(config, 'DIR/config.json')
    for key in NUMBERS.keys() & config.keys():
        for value in VALUES:
            check({**config, key: value}, key, value)


@pytest.mark.parametrize('kind', ROPE)
def test_numbers_of_rotary_positions(kind):
    config = {**defaults('llama'), 'rope_parameters': {'rope_type': kind.partition(',')[0], **ROPE[kind]}}
    from_config(config, 'DIR/config.json')
    for key in ROPE[kind]:
        for value in VALUES:
            check({**config, 'rope_parameters': {**config['rope_parameters'], key: value}}, key, value)


def test_no_number_is_omitted():
    tried = {key for kind in ARCHITECTURES for key in defaults(kind)} | {key for rope in ROPE.values() for key in rope}
    # tests/huggingface/nanochat tries the keys of nanochat's own files.
    assert NUMBERS.keys() - tried - KEYS.keys() == set(IDS)


@pytest.mark.parametrize(
    ('keys', 'parts'),
    [
        ({'num_attention_heads': 3}, ['num_attention_heads=3', 'does not divide hidden_size=32']),
        ({'num_key_value_heads': 3}, ['num_key_value_heads=3', 'does not divide num_attention_heads=4']),
        ({'num_key_value_heads': 8}, ['num_key_value_heads=8', 'does not divide num_attention_heads=4']),
        ({'head_dim': 7}, ['head_dim 7', 'odd']),
        ({'layer_types': ['full_attention'] * 3}, ['layer_types', 'must have 2 entries']),
        ({'layer_types': ['full_attention'] * 10**5}, ['layer_types', 'must have 2 entries']),
        ({'layer_types': 2}, ['layer_types=2', 'must have 2 entries']),
        (
            {'rope_scaling': {'rope_type': 'llama3', 'factor': 8, 'low_freq_factor': 5, 'high_freq_factor': 4}},
            ['low_freq_factor=5.0 must be below high_freq_factor=4.0'],
        ),
    ],
)
def test_inconsistent_numbers(keys, parts):
    sizes = {'model_type': 'llama', 'hidden_size': 32, 'num_attention_heads': 4, 'num_hidden_layers': 2}
    from_config(sizes, 'DIR/config.json')
    with pytest.raises(InputError) as info:
        from_config({**sizes, **keys}, 'DIR/config.json')
    for part in ['DIR/config.json: ', *parts]:
        assert part in str(info.value)
    assert len(str(info.value)) < 500


@pytest.mark.parametrize('key', IDS)
def test_ids_of_a_generation_config(tmp_path, key):
    path = tmp_path / 'generation_config.json'
    for value in [*VALUES, [1, 2], [1, -5], [[1]]]:
        path.write_text(json.dumps({key: value}))
        ids = value if isinstance(value, list) and key == 'eos_token_id' else [value]
        if value is None or all(index in NUMBERS[key] for index in ids):
            files_for_import(tmp_path)
            continue
        with pytest.raises(InputError) as info:
            files_for_import(tmp_path)
        assert str(info.value).startswith(f'{path}: {key}={display_value(value)}'.removesuffix('…')[:100])
        assert 'must be an integer of at least -1' in str(info.value)
