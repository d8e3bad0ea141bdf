"""Converts rotary position settings between a config.json and `model.*`.

Transformers 5 has all settings in `rope_parameters`. Earlier versions have `rope_theta` and the fraction of rotated
dims at top level, next to `rope_scaling`. Both forms are read, with the precedence of Transformers 5, and both are
written. Formulas: Transformers, `modeling_rope_utils.py`; maxlm: `maxlm/model/layers/rope.py`.
"""

from __future__ import annotations

import math
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.config_fields import Fields
from maxlm.log import warn_once

DEFAULT_THETA = 10_000.0
# Default of rope_parameters of gpt-oss.
GPT_OSS_ROPE = {'rope_type': 'yarn', 'factor': 32.0, 'truncate': False, 'original_max_position_embeddings': 4096}
DEFAULT_THETAS = {
    'mixtral': 1_000_000.0,
    'gpt_oss': 150_000.0,
    'smollm3': 2_000_000.0,
    'olmo3': 500_000.0,
    'gemma3_text': 1_000_000.0,
}
# GPT-NeoX uses other names. It and Phi-3 rotate a part of each head.
NEOX, PHI3 = 'gpt_neox', 'phi3'
# Architectures that multiply scores by mscale².
DEEPSEEK = ('deepseek_v2', 'deepseek_v3')
NEOX_FRACTION = 0.25
# Default of original_max_position_embeddings of Phi-3.
PHI3_POSITIONS = 4096
# Architectures with settings of their own for layers with sliding windows, and the default base of these layers.
LOCAL_THETAS = {'olmo3': 500_000.0, 'gemma3_text': 10_000.0}
_FULL, _SLIDING = 'full_attention', 'sliding_attention'


def to_rope(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """Returns the config.json keys of a rotary model's positions."""
    scaling = _scaling(model)
    fraction = {'partial_rotary_factor': model.partial_rotary_factor} if architecture in (NEOX, PHI3) else {}
    parameters: dict[str, Any] = {'rope_type': 'default', **(scaling or {}), 'rope_theta': model.rope_theta, **fraction}
    # The oldest versions read the type from `type`.
    scaling = scaling and {**scaling, 'type': scaling['rope_type']}
    legacy: dict[str, Any]
    if architecture == NEOX:
        legacy = {
            'rotary_emb_base': model.rope_theta,
            'rotary_pct': model.partial_rotary_factor,
            'rope_scaling': scaling,
        }
    else:
        legacy = {'rope_theta': model.rope_theta, 'rope_scaling': scaling}
    if architecture == PHI3:
        legacy |= {**fraction, 'original_max_position_embeddings': model.original_max_positions}
    if architecture in LOCAL_THETAS:
        local = {'rope_type': 'default', 'rope_theta': model.rope_local_theta} if model.rope_local_theta else parameters
        parameters = {_FULL: parameters, _SLIDING: local}
        legacy['rope_local_base_freq'] = local['rope_theta']
    # Dynamic scaling starts after max_position_embeddings positions; for other types it is the longest context.
    dynamic = model.rope_scaling == 'dynamic'
    positions = model.original_max_positions if dynamic else model.max_positions
    return {'max_position_embeddings': positions, 'rope_parameters': parameters, **legacy}


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    factor, original = model.rope_scaling_factor, model.original_max_positions
    if model.rope_scaling in ('linear', 'dynamic'):
        return {'rope_type': model.rope_scaling, 'factor': factor}
    if model.rope_scaling == 'longrope':
        attention_factor = model.rope_attention_factor
        return {
            'rope_type': 'longrope',
            'factor': factor,
            'original_max_position_embeddings': original,
            'short_factor': list(model.rope_short_factors),
            'long_factor': list(model.rope_long_factors),
            **({'attention_factor': attention_factor} if attention_factor else {}),
        }
    if model.rope_scaling == 'llama3':
        return {
            'rope_type': 'llama3',
            'factor': factor,
            'original_max_position_embeddings': original,
            'low_freq_factor': model.rope_low_freq_factor,
            'high_freq_factor': model.rope_high_freq_factor,
        }
    if model.rope_scaling == 'yarn':
        attention_factor = model.rope_attention_factor
        return {
            'rope_type': 'yarn',
            'factor': factor,
            'original_max_position_embeddings': original,
            'beta_slow': model.rope_beta_slow,
            'beta_fast': model.rope_beta_fast,
            'truncate': model.rope_truncate,
            **({'attention_factor': attention_factor} if attention_factor else {}),
            **({'mscale_all_dim': model.rope_mscale_all_dim} if model.rope_mscale_all_dim else {}),
        }
    assert model.rope_scaling == 'none', model.rope_scaling
    return None


def from_rope(config: Fields, architecture: str, max_positions: int) -> dict[str, Any]:
    """Returns the rotary settings of `model.*`, and `max_positions` if the scaling changes it.

    Args:
        config: the complete config.json.
        architecture: its model_type.
        max_positions: its max_position_embeddings.

    Raises:
        InputError: the type of scaling is not supported, or a value is invalid.
    """
    key = 'rope_scaling' if config.values.get('rope_scaling') else 'rope_parameters'
    values = config.values.get(key) or (GPT_OSS_ROPE if architecture == 'gpt_oss' else {})
    if not isinstance(values, dict):
        raise config.error(key, 'must be a JSON object')
    local: dict[str, Any] = {}
    if architecture in LOCAL_THETAS:
        values, local = _by_layer_type(config, architecture)
    elif _FULL in values or _SLIDING in values:
        raise config.error(
            key, 'different rotary positions per layer are not supported; use one setting for all layers'
        )
    rope = Fields(values, f'{config.source}: {key}')
    theta_key, fraction_key, fraction = 'rope_theta', 'partial_rotary_factor', 1.0
    if architecture == NEOX:
        theta_key, fraction_key, fraction = 'rotary_emb_base', 'rotary_pct', NEOX_FRACTION
    theta = rope.number('rope_theta', config.number(theta_key, DEFAULT_THETAS.get(architecture, DEFAULT_THETA)))
    fraction = rope.number('partial_rotary_factor', config.number(fraction_key, fraction))
    kind = rope.text('rope_type', rope.text('type', 'default'))
    if architecture not in (NEOX, PHI3) and fraction != 1:
        message = (rope if 'partial_rotary_factor' in values else config).error(
            'partial_rotary_factor', f'{architecture} models rotate all dims of a head'
        )
        if kind != 'default':
            # Transformers fails to run such a model.
            raise InputError(f'{message}; set it to 1.0')
        warn_once(f'{message} in Transformers, which ignores the key, and so does maxlm')
        fraction = 1.0
    settings: dict[str, Any] = {'rope_theta': theta, 'partial_rotary_factor': fraction, **local}
    if architecture == PHI3 and kind in ('su', 'yarn'):
        # Former names.
        kind = 'longrope'
    if kind == 'default':
        return settings
    supported = ['longrope'] if architecture == PHI3 else ['linear', 'dynamic', 'yarn', 'llama3']
    if kind not in supported:
        name = 'rope_type' if 'rope_type' in values else 'type'
        others = ', '.join(['default', *supported[:-1]])
        raise rope.error(name, f'not supported; use {others} or {supported[-1]}')
    # Phi has the value at top level, which takes precedence for all architectures in Transformers 5.
    default_original = PHI3_POSITIONS if architecture == PHI3 else max_positions
    original = rope.integer('original_max_position_embeddings', default_original, null=default_original)
    original = config.integer('original_max_position_embeddings', original, null=original)
    if kind == 'longrope' and values.get('factor') is None:
        factor = max(1.0, max_positions / original)
    elif kind == 'yarn' and values.get('factor') is None and 'factor' in values:
        factor = max_positions / original
    else:
        if 'factor' not in values:
            raise rope.error('factor', f'missing, but required for {kind} scaling; set it')
        factor = rope.number('factor', 1.0)
    settings |= {'rope_scaling': kind, 'rope_scaling_factor': factor}
    if kind == 'dynamic':
        settings |= {'original_max_positions': max_positions, 'max_positions': round(max_positions * factor)}
    elif kind == 'longrope':
        settings['original_max_positions'] = original
        for name in ('short_factor', 'long_factor'):
            settings[f'rope_{name}s'] = _factors(rope, name)
        settings['rope_attention_factor'] = _attention_factor(rope, factor)
    elif kind == 'llama3':
        for name in ('low_freq_factor', 'high_freq_factor'):
            if name not in values:
                raise rope.error(name, 'missing, but required for llama3 scaling; set it')
        settings['original_max_positions'] = original
        settings['rope_low_freq_factor'] = rope.number('low_freq_factor', 1.0)
        settings['rope_high_freq_factor'] = rope.number('high_freq_factor', 4.0)
    elif kind == 'yarn':
        settings['original_max_positions'] = original
        settings['rope_beta_slow'] = rope.number('beta_slow', 1.0, null=1.0) or 1.0
        settings['rope_beta_fast'] = rope.number('beta_fast', 32.0, null=32.0) or 32.0
        settings['rope_truncate'] = rope.flag('truncate', True)
        settings['rope_attention_factor'] = _attention_factor(rope, factor)
        if architecture in DEEPSEEK:
            settings['rope_mscale_all_dim'] = rope.number('mscale_all_dim', 0.0, null=0.0)
    return settings


def _by_layer_type(config: Fields, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of layers with full attention, and the settings of layers with sliding windows."""
    parameters = config.values.get('rope_parameters') or {}
    if not isinstance(parameters, dict):
        raise config.error('rope_parameters', 'must be a JSON object')
    full: Any = {}
    local: Any = None
    if _FULL in parameters or _SLIDING in parameters:
        full, local = parameters.get(_FULL) or {}, parameters.get(_SLIDING) or {}
    elif parameters:
        full = parameters
    if not isinstance(full, dict) or not isinstance(local or {}, dict):
        raise config.error('rope_parameters', f'{_FULL} and {_SLIDING} must be JSON objects')
    if not local or local != full:
        # The former key, which concerns only layers with full attention.
        full = full | (config.values.get('rope_scaling') or {})
    rope = Fields(local or {}, f'{config.source}: rope_parameters: {_SLIDING}')
    if rope.text('rope_type', 'default') != 'default':
        if local != full:
            raise rope.error('rope_type', f'must be default, or equal to that of {_FULL}')
        return full, {'rope_local_theta': 0.0}
    default = LOCAL_THETAS[architecture]
    if architecture == 'gemma3_text':
        default = config.number('rope_local_base_freq', default)
    elif local is None:
        default = config.number('rope_theta', default)
    return full, {'rope_local_theta': rope.number('rope_theta', default)}


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.values.get(name)
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        raise rope.error(name, 'must be a list of numbers')
    return tuple(map(float, values))


def _attention_factor(rope: Fields, factor: float) -> float:
    """Returns the factor of queries and keys; 0 if it follows from the scaling factor alone."""
    if rope.values.get('attention_factor') is not None:
        return rope.number('attention_factor', 1.0)
    mscale, all_dim = (rope.number(name, 0.0, null=0.0) for name in ('mscale', 'mscale_all_dim'))
    if not (mscale and all_dim):
        return 0.0
    return _mscale(factor, mscale) / _mscale(factor, all_dim)


def _mscale(factor: float, weight: float) -> float:
    """Returns the mscale formula of DeepSeek-V2 (2024), which equals that of YaRN for weight 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
