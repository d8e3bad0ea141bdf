"""Tests rotary embeddings in both directions: scalings, both forms of config.json, and the angles of Transformers."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers

from maxlm.huggingface.config_conversion import from_config, to_config
from maxlm.model.layers.rope import rotary_angles
from tests.huggingface.test_config_conversion import essentials, in_transformers
from tests.messages import input_error
from tests.small import small_config

SCALINGS = {
    'none': {},
    'theta': {'rope_theta': 123.0},
    'linear': {'rope_scaling': 'linear', 'rope_scaling_factor': 4.0},
    'dynamic': {'rope_scaling': 'dynamic', 'rope_scaling_factor': 4.0},
    'yarn': {'rope_scaling': 'yarn', 'rope_scaling_factor': 4.0},
    'yarn, all of it': {
        'rope_scaling': 'yarn',
        'rope_scaling_factor': 3.0,
        'original_max_positions': 20,
        'rope_beta_slow': 0.5,
        'rope_beta_fast': 6.0,
        'rope_truncate': False,
        'rope_attention_factor': 0.8,
    },
    'llama3': {
        'rope_scaling': 'llama3',
        'rope_scaling_factor': 8.0,
        'original_max_positions': 16,
        'rope_low_freq_factor': 0.5,
        'rope_high_freq_factor': 3.0,
    },
}
FAMILIES = ('gpt_neox', 'llama', 'qwen3')


def scaled_model(family, scaling):
    overrides = {f'model__{key}': value for key, value in SCALINGS[scaling].items()}
    return small_config(model__family=family, model__max_positions=64, model__dim=64, **overrides).model


@pytest.mark.parametrize('scaling', SCALINGS)
@pytest.mark.parametrize('family', FAMILIES)
def test_round_trip(family, scaling):
    model = scaled_model(family, scaling)
    config = json.loads(json.dumps(to_config(model)))
    assert essentials(from_config(config, 'config.json')) == essentials(model)
    assert essentials(from_config(in_transformers(config), 'config.json')) == essentials(model)


@pytest.mark.parametrize('scaling', SCALINGS)
@pytest.mark.parametrize('family', FAMILIES)
def test_either_form_is_sufficient(family, scaling):
    model = scaled_model(family, scaling)
    config = to_config(model)
    old = {key: value for key, value in config.items() if key != 'rope_parameters'}
    new = {
        key: value
        for key, value in config.items()
        if key not in ('rope_scaling', 'rope_theta', 'rotary_emb_base', 'rotary_pct')
    }
    assert len(old) == len(config) - 1
    for form in (old, new):
        assert essentials(from_config(form, 'config.json')) == essentials(model)
        assert essentials(from_config(in_transformers(form), 'config.json')) == essentials(model)
    if old['rope_scaling']:
        # The oldest files use the key `type`.
        old['rope_scaling'] = {k: v for k, v in old['rope_scaling'].items() if k != 'rope_type'}
        assert essentials(from_config(old, 'config.json')) == essentials(model)


angles = jax.jit(rotary_angles, static_argnums=1)


def angles_in_transformers(config, length):
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        cos, sin = model.rotary_emb(torch.zeros(1, length, 4), torch.arange(length)[None])
    return cos.numpy()[0], sin.numpy()[0]


# Scalings are the same in all families. GPT-NeoX rotates a part of each head.
@pytest.mark.parametrize(
    ('family', 'scaling'), [*(('llama', name) for name in SCALINGS), ('gpt_neox', 'yarn, all of it'), ('qwen3', 'none')]
)
def test_angles_equal_transformers(family, scaling):
    length, model = 40, scaled_model(family, scaling)
    config = {**to_config(model), 'num_hidden_layers': 1, 'layer_types': None, 'vocab_size': 4}
    cos, sin = angles_in_transformers(config, length)
    ours = angles(np.arange(length)[None, :], model)
    half = cos.shape[-1] // 2
    np.testing.assert_allclose(ours.cos_BT1P[0, :, 0], cos[:, :half], atol=1e-5)
    np.testing.assert_allclose(ours.sin_BT1P[0, :, 0], sin[:, :half], atol=1e-5)
    if scaling != 'none':
        plain = angles(np.arange(length)[None, :], scaled_model(family, 'none'))
        assert np.abs(np.asarray(plain.cos_BT1P[0, :, 0]) - cos[:, :half]).max() > 1e-2


LLAMA = {'model_type': 'llama', 'max_position_embeddings': 4096}


def read(scaling, **keys):
    return from_config({**LLAMA, **keys, 'rope_scaling': scaling}, 'config.json')


def test_dynamic_scaling_starts_beyond_the_positions_of_the_file():
    model = read({'type': 'dynamic', 'factor': 2.5})
    assert (model.original_max_positions, model.max_positions) == (4096, 10_240)
    assert to_config(model)['max_position_embeddings'] == 4096


def test_the_original_context_defaults_to_the_full_context():
    yarn = {'rope_type': 'yarn', 'factor': 4.0}
    assert read(yarn).original_max_positions == 4096
    assert read({**yarn, 'original_max_position_embeddings': 1024}).original_max_positions == 1024
    # The top-level value takes precedence, as in Transformers.
    beside = read({**yarn, 'original_max_position_embeddings': 1024}, original_max_position_embeddings=512)
    assert beside.original_max_positions == 512


def test_yarn_of_deepseek():
    yarn = {'rope_type': 'yarn', 'factor': 40.0, 'mscale': 0.7, 'mscale_all_dim': 1.3}
    given = read(yarn).rope_attention_factor
    assert given == pytest.approx((0.07 * np.log(40) + 1) / (0.13 * np.log(40) + 1))
    assert read({**yarn, 'mscale_all_dim': 0}).rope_attention_factor == 0
    without_factor = {'rope_type': 'yarn', 'factor': None, 'original_max_position_embeddings': 512}
    assert read(without_factor).rope_scaling_factor == 8.0


@pytest.mark.parametrize(
    ('scaling', 'parts'),
    [
        ({'rope_type': 'longrope', 'factor': 2.0}, ["rope_type='longrope'", 'not supported', 'llama3']),
        ({'type': 'su'}, ["type='su'", 'not supported']),
        ({'type': 'mrope'}, ["type='mrope'"]),
        ({'rope_type': 'proportional'}, ['proportional']),
        ({'rope_type': 3}, ['rope_type=3', 'string']),
        ({'rope_type': 'linear'}, ['factor: missing']),
        ({'rope_type': 'linear', 'factor': 'two'}, ["factor='two'", 'number']),
        ({'rope_type': 'linear', 'factor': 0.5}, ['factor=0.5', 'at least 1']),
        ({'rope_type': 'llama3', 'factor': 8.0}, ['low_freq_factor: missing']),
        (
            {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 4.0, 'high_freq_factor': 4.0},
            ['low_freq_factor=4.0'],
        ),
        ({'rope_type': 'yarn', 'factor': 2.0, 'attention_factor': -1}, ['attention_factor=-1']),
        ({'rope_type': 'yarn', 'factor': 2.0, 'original_max_position_embeddings': 0}, ['original_max_position']),
        ({'full_attention': {'rope_type': 'default'}}, ['rotary positions per layer']),
        ({'rope_type': 'linear', 'factor': 2.0, 'partial_rotary_factor': 0.5}, ['partial_rotary_factor=0.5']),
        ([2.0], ['rope_scaling=[2.0]', 'JSON object']),
    ],
)
def test_invalid_scalings_are_refused_by_name(scaling, parts):
    with input_error('config.json', *parts):
        read(scaling)
