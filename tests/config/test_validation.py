"""Tests that inconsistent model settings are rejected with their names and valid values."""

import pytest

from maxlm.config.loading import build, default
from maxlm.errors import InputError
from tests.messages import input_error


def model_config(**settings):
    values = default()
    values.train.num_steps, values.train.global_batch_size = 1, 1
    for key, value in {'num_layers': 2, 'dim': 32, 'num_heads': 4, 'family': 'llama', **settings}.items():
        values.model[key] = value
    return build(values).model


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'scan_layers': False, 'num_layers': 201}, ['num_layers=201', 'scan_layers=True']),
        ({'rope_scaling_factor': 2.0}, ['rope_scaling_factor=2.0', 'rope_scaling', 'yarn']),
        ({'rope_scaling': 'linear', 'family': 'gpt2'}, ['rope_scaling=linear', 'learned', 'rotary']),
        ({'rope_scaling': 'dynamic', 'head_dim': 2}, ['dynamic', '4 rotated']),
        ({'rope_low_freq_factor': 4.0}, ['rope_low_freq_factor=4.0', 'rope_high_freq_factor=4.0']),
        ({'rope_beta_fast': 1.0}, ['rope_beta_slow', 'rope_beta_fast=1.0']),
        ({'partial_rotary_factor': 0.4}, ['partial_rotary_factor=0.4', 'odd']),
        ({'attention_pattern': ''}, ['attention_pattern', 'SSSL']),
        ({'attention_pattern': 'SX', 'sliding_window': 2}, ['SX', 'S (sliding window)']),
        ({'attention_pattern': 'SSL', 'sliding_window': 2}, ['SSL', '3 letters', '2 layers']),
        ({'attention_pattern': 'S'}, ['sliding_window=0', 'at least 1']),
        ({'sliding_window': 4}, ['sliding_window=4', 'attention_pattern=L']),
        ({'attention_pattern': 'LN', 'family': 'gpt2'}, ['attention_pattern=LN', 'learned', 'use L']),
        ({'value_embedding_pattern': 'NX'}, ['value_embedding_pattern=NX', 'V (value embedding)']),
        ({'value_embedding_pattern': 'N'}, ['value_embedding_pattern=N', 'at least one V']),
        ({'value_embedding_pattern': 'NNV'}, ['value_embedding_pattern=NNV', '3 letters', '2 layers']),
        ({'value_gate_channels': 4}, ['value_gate_channels=4', 'value_embedding_pattern']),
        ({'value_embedding_pattern': 'V', 'value_gate_channels': 99}, ['value_gate_channels=99', 'model.dim=']),
        (
            {'relative_attention_multiplier': 1.44, 'attention_multiplier': 0.5},
            ['relative_attention_multiplier=1.44', 'attention_multiplier=0.5'],
        ),
        (
            {'norm_placement': 'post', 'family': 'gpt_neox'},
            ['norm_placement=post', 'parallel_residual=True', 'norm_placement=pre'],
        ),
        ({'norm_unit_offset': True, 'family': 'nanochat'}, ['norm_unit_offset=True', 'norm_use_scale=False']),
        ({'rope_short_factors': (1.0,)}, ['rope_short_factors has 1 values', 'rope_scaling=none', 'set 0']),
        (
            {'rope_scaling': 'longrope', 'rope_short_factors': (1.0,), 'rope_long_factors': (0,)},
            ['rope_short_factors', 'greater than 0'],
        ),
    ],
)
def test_invalid_settings_are_rejected(settings, fragments):
    with input_error(*fragments):
        model_config(**settings)


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        ('layernom', "model.norm='layernom': must be one of layernorm, rmsnorm; did you mean 'layernorm'?"),
        ('xyz', "model.norm='xyz': must be one of layernorm, rmsnorm"),
    ],
)
def test_the_choices_are_listed_once(value, message):
    with pytest.raises(InputError) as error:
        model_config(norm=value)
    assert str(error.value) == message


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'rope_scaling': 'yarn', 'rope_scaling_factor': 2.0, 'rope_low_freq_factor': 3.0},
        {'attention_pattern': 'SL', 'sliding_window': 2},
        {'family': 'gpt_neox', 'num_kv_heads': 2, 'head_dim': 16},
        {'family': 'qwen3', 'head_dim': 128},
        {'family': 'nanochat', 'logit_softcap': 0.0},
        {
            'family': 'nanochat',
            'rope_theta': 100_000.0,
            'norm_epsilon': 1.19e-7,
            'attention_pattern': 'SL',
            'sliding_window': 129,
            'relative_attention_multiplier': 1.44,
            'value_embedding_pattern': 'NV',
            'value_gate_channels': 12,
        },
        # One factor for all heads.
        {'family': 'granite', 'relative_attention_multiplier': 1.44, 'attention_multiplier': 0.0},
        {'family': 'gemma2', 'attention_pattern': 'LS', 'sliding_window': 9},
        {'family': 'smollm3', 'attention_pattern': 'NL', 'sliding_window': 0},
    ],
)
def test_valid_settings_are_accepted(settings):
    model = model_config(**settings)
    assert all(getattr(model, key) == value for key, value in settings.items())
