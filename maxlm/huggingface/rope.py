"""Converts rotary position settings between a config.json and `model.*`.

Transformers 5 has all settings in `rope_parameters`. Earlier versions have `rope_theta` and the fraction of rotated
dims at top level, next to `rope_scaling`. Both forms are read, with the precedence of Transformers 5, and both are
written. Formulas: Transformers, `modeling_rope_utils.py`; maxlm: `maxlm/model/layers/rope.py`.
"""

from __future__ import annotations

import math
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.json_fields import Fields

DEFAULT_THETA = 10_000.0
# GPT-NeoX uses other names, and is the only architecture here that rotates a part of each head.
NEOX = 'gpt_neox'
# The only architecture here that multiplies scores by mscale².
DEEPSEEK = 'deepseek_v3'
NEOX_FRACTION = 0.25
_LAYER_TYPES = ('full_attention', 'sliding_attention')


def to_rope(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """Returns the config.json keys of a rotary model's positions."""
    scaling = _scaling(model)
    fraction = {'partial_rotary_factor': model.partial_rotary_factor} if architecture == NEOX else {}
    parameters = {'rope_type': 'default', **(scaling or {}), 'rope_theta': model.rope_theta, **fraction}
    # The oldest versions read the type from `type`.
    scaling = scaling and {**scaling, 'type': scaling['rope_type']}
    if architecture == NEOX:
        legacy = {
            'rotary_emb_base': model.rope_theta,
            'rotary_pct': model.partial_rotary_factor,
            'rope_scaling': scaling,
        }
    else:
        legacy = {'rope_theta': model.rope_theta, 'rope_scaling': scaling}
    # Dynamic scaling starts after max_position_embeddings positions; for other types it is the longest context.
    dynamic = model.rope_scaling == 'dynamic'
    positions = model.original_max_positions if dynamic else model.max_positions
    return {'max_position_embeddings': positions, 'rope_parameters': parameters, **legacy}


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    factor, original = model.rope_scaling_factor, model.original_max_positions
    if model.rope_scaling in ('linear', 'dynamic'):
        return {'rope_type': model.rope_scaling, 'factor': factor}
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
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, 'must be a JSON object')
    if any(name in values for name in _LAYER_TYPES):
        raise config.error(
            key, 'different rotary positions per layer are not supported; use one setting for all layers'
        )
    rope = Fields(values, f'{config.source}: {key}')
    theta_key, fraction_key, fraction = 'rope_theta', 'partial_rotary_factor', 1.0
    if architecture == NEOX:
        theta_key, fraction_key, fraction = 'rotary_emb_base', 'rotary_pct', NEOX_FRACTION
    theta = rope.number('rope_theta', config.number(theta_key, DEFAULT_THETA))
    fraction = rope.number('partial_rotary_factor', config.number(fraction_key, fraction))
    if architecture != NEOX and fraction != 1:
        raise (rope if 'partial_rotary_factor' in values else config).error(
            'partial_rotary_factor', f'{architecture} rotates all dims of a head; must be 1.0'
        )
    settings: dict[str, Any] = {'rope_theta': theta, 'partial_rotary_factor': fraction}
    kind = rope.text('rope_type', rope.text('type', 'default'))
    if kind == 'default':
        return settings
    if kind not in ('linear', 'dynamic', 'yarn', 'llama3'):
        name = 'rope_type' if 'rope_type' in values else 'type'
        raise rope.error(name, 'not supported; use default, linear, dynamic, yarn or llama3')
    # Phi has the value at top level, which takes precedence for all architectures in Transformers 5.
    original = rope.integer('original_max_position_embeddings', max_positions, null=max_positions)
    original = config.integer('original_max_position_embeddings', original, null=original)
    if kind == 'yarn' and values.get('factor') is None and 'factor' in values:
        factor = max_positions / original
    else:
        if 'factor' not in values:
            raise rope.error('factor', f'missing, but required for {kind} scaling; set it')
        factor = rope.number('factor', 1.0)
    settings |= {'rope_scaling': kind, 'rope_scaling_factor': factor}
    if kind == 'dynamic':
        settings |= {'original_max_positions': max_positions, 'max_positions': round(max_positions * factor)}
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
        if architecture == DEEPSEEK:
            settings['rope_mscale_all_dim'] = rope.number('mscale_all_dim', 0.0, null=0.0)
    return settings


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
