"""Reads the rotary positions of a GGUF file. The inverse of `export_gguf` and `frequency_factors`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxlm.errors import InputError
from maxlm.huggingface.gguf.architectures import FACTORS_LLAMA3, FACTORS_LONGROPE, llama3_factors
from maxlm.huggingface.gguf.metadata import Metadata
from maxlm.model.layers.rope import longrope_attention_factor

# Largest relative difference between stored and computed frequency factors, which are rounded to float32.
_TOLERANCE = 1e-4


def read_positions(metadata: Metadata, factors: Mapping[str, np.ndarray], model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary positions."""
    theta = metadata.number('rope.freq_base', 10_000.0)
    settings: dict[str, Any] = {'rope_theta': theta, 'rope_scaling': 'none'}
    head_dim = model.get('head_dim', 0)
    rotated = metadata.integer('rope.dimension_count', head_dim)
    if metadata.kind == 'phi3' and head_dim:
        settings['partial_rotary_factor'] = rotated / head_dim
    elif metadata.kind != 'deepseek2' and rotated != head_dim:
        raise metadata.error('rope.dimension_count', f'must be {head_dim}, that of a head; use another model')
    # Old files have only a factor, under the second name. 0 means no scaling.
    factor = metadata.number('rope.scaling.factor', metadata.number('rope.scale_linear', 1.0)) or 1.0
    kind = metadata.value('rope.scaling.type') or ('none' if factor == 1 else 'linear')
    original = metadata.integer('rope.scaling.original_context_length', model['max_positions'])
    magnitude = metadata.number('rope.scaling.attn_factor', 0.0)
    if kind not in ('none', 'linear', 'yarn', 'longrope'):
        raise metadata.error('rope.scaling.type', 'not supported; use none, linear, yarn or longrope')
    if all(name in factors for name in FACTORS_LONGROPE):
        # The shortest decimal numbers, as in `GgufFiles.metadata`.
        long, short = (tuple(float(str(value)) for value in factors[name]) for name in FACTORS_LONGROPE)
        factor = max(1.0, model['max_positions'] / original)
        is_default = math.isclose(magnitude, longrope_attention_factor(factor, original), rel_tol=1e-6)
        return settings | {
            'rope_scaling': 'longrope',
            'rope_scaling_factor': factor,
            'original_max_positions': original,
            'rope_short_factors': short,
            'rope_long_factors': long,
            'rope_attention_factor': 0.0 if is_default else magnitude,
        }
    if kind in ('none', 'linear') and magnitude not in (0, 1):
        raise metadata.error('rope.scaling.attn_factor', 'supported only with yarn and longrope; use another model')
    if FACTORS_LLAMA3 in factors:
        return settings | _llama3(metadata, factors[FACTORS_LLAMA3], theta, model)
    if kind in ('none', 'longrope') or (kind == 'linear' and factor == 1):
        return settings
    settings |= {'rope_scaling': kind, 'rope_scaling_factor': factor}
    if kind == 'yarn':
        settings |= {
            'original_max_positions': original,
            'rope_beta_fast': metadata.number('rope.scaling.yarn_beta_fast', 32.0),
            'rope_beta_slow': metadata.number('rope.scaling.yarn_beta_slow', 1.0),
            'rope_attention_factor': magnitude,
        }
    return settings


def _llama3(metadata: Metadata, factors: np.ndarray, theta: float, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of llama3 scaling, which the file has only as the divisors of the frequencies.

    The divisors determine the factor and, with the frequencies between the two bounds, the ratios of the bounds. The
    remaining freedom has no effect, so the lower bound is 1, as in all published models.
    """
    head_dim, factor = model['head_dim'], float(factors.max())
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if len(factors) != len(frequencies) or not (factors > 0).all() or factor < 1:
        raise InputError(f'{metadata.source}: tensor {FACTORS_LLAMA3} does not fit heads of {head_dim}; convert again')
    if factor == 1:
        return {}
    between = (factors > 1) & (factors < factor)
    candidates = [(1.0, 4.0, 8192)]
    if between.sum() >= 2:
        # 1 / divisor = (1 - ramp) / factor + ramp, and ramp = (original · frequency / 2π - low) / (high - low).
        ramp = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequencies[between], ramp, 1)
        if slope > 0 and intercept < 0:
            width = -1 / intercept
            candidates.insert(0, (1.0, round(1 + width, 3), round(slope * width * 2 * math.pi)))
    for low, high, original in candidates:
        settings = {
            'rope_scaling': 'llama3',
            'rope_scaling_factor': factor,
            'rope_low_freq_factor': low,
            'rope_high_freq_factor': high,
            'original_max_positions': original,
        }
        if np.allclose(llama3_factors(head_dim, theta, factor, low, high, original), factors, rtol=_TOLERANCE):
            return settings
    raise InputError(
        f'{metadata.source}: tensor {FACTORS_LLAMA3} does not have the factors of llama3 scaling; use the Transformers '
        'directory of the model instead'
    )
