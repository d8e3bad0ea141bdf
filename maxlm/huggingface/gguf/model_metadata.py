"""Reads the model of a GGUF file from its metadata and the names of its tensors.

The inverse of `GgufArchitecture.add_metadata`. Defaults are those of llama.cpp (llama-model.cpp), which has some
settings in its code instead of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxlm.config.resolve import config_for_model
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import shortest_pattern
from maxlm.huggingface.gguf.architectures import (
    ACTIVATIONS,
    KINDS,
    WIDE_GEMMA,
    Gating,
)
from maxlm.huggingface.gguf.metadata import Metadata
from maxlm.huggingface.gguf.positions import read_positions

# Windows of layers by kind, if the file has only the size of the window.
_PATTERNS = {'olmo2': 'SSSL', 'gemma2': 'SL', 'gemma3': 'SSSSSL', 'gpt-oss': 'SL', 'phi3': 'S'}
_BIASES = {'qkv': ('attn_q', 'attn_qkv'), 'out': ('attn_output',), 'mlp': ('ffn_up', 'ffn_up_exps')}


def read_model(
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, np.ndarray],
    *,
    dtype: str,
    source: str,
) -> tuple[Config, str]:
    """Returns the config of a model, and its model_type in Transformers.

    Args:
        values: metadata of the file.
        shapes: shapes of its tensors by name.
        factors: values of its tensors of frequency factors by name.
        dtype: value of `model.dtype`.
        source: path of the file, for messages.

    Raises:
        InputError: the model is not supported, or a value is missing or invalid. The message names the key.
    """
    metadata = Metadata(values, source)
    if metadata.kind not in KINDS:
        raise InputError(
            f'{source}: general.architecture={metadata.kind!r:.100} is not supported; use one of '
            f'{", ".join(sorted(KINDS))}'
        )
    if 'token_embd.weight' not in shapes:
        raise InputError(f'{source}: tensor token_embd.weight is missing; use a file with a complete language model')
    architecture = _architecture(metadata)
    row = ARCHITECTURES[architecture]
    has_experts = metadata.integer('expert_count', 0) > 0
    model = {'family': row.family, **row.fixed_settings, **(row.expert_settings if has_experts else {})}
    model |= {'dtype': dtype, **_shape(metadata, shapes)} | _biases(shapes, row.biases)
    model |= read_positions(metadata, factors, model) | _windows(metadata)
    model['activation'] = ACTIVATIONS.get(metadata.kind, 'swiglu')
    if has_experts:
        model |= _experts(metadata, architecture)
    model |= _SETTINGS.get(metadata.kind, lambda *_: {})(metadata, model)
    metadata.check_all_read()
    return config_for_model(model, source), architecture


def _architecture(metadata: Metadata) -> str:
    """Returns the model_type. Several have the same kind of file."""
    if metadata.kind == 'llama':
        return 'mixtral' if metadata.integer('expert_count', 0) else 'llama'
    if metadata.kind == 'olmo2':
        return 'olmo3' if metadata.integer('attention.sliding_window', 0) else 'olmo2'
    if metadata.kind == 'deepseek2':
        is_v2 = metadata.integer('expert_count', 0) and _gating(metadata) is Gating.softmax
        return 'deepseek_v2' if is_v2 else 'deepseek_v3'
    return KINDS[metadata.kind]


def _gating(metadata: Metadata) -> Gating:
    # Files of DeepSeek-V2 without the key precede DeepSeek-V3.
    number = metadata.integer('expert_gating_func', Gating.softmax.value)
    if number not in [gating.value for gating in Gating]:
        raise metadata.error('expert_gating_func', 'not supported; use a model with softmax (1) or sigmoid (2)')
    return Gating(number)


def _shape(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    heads = metadata.integer('attention.head_count')
    dim = metadata.integer('embedding_length')
    if not heads:
        raise metadata.error('attention.head_count', 'must be at least 1; download the file again')
    max_positions = metadata.integer('context_length')
    if max_positions < 2:
        raise metadata.error('context_length', 'must be at least 2; download the file again')
    norm = 'layer_norm_epsilon' if metadata.kind == 'starcoder2' else 'layer_norm_rms_epsilon'
    model = {
        'vocab_size': shapes['token_embd.weight'][0],
        'dim': dim,
        'num_layers': metadata.integer('block_count'),
        'num_heads': heads,
        'ffn_dim': metadata.integer('feed_forward_length', 0),
        'norm_epsilon': metadata.number(f'attention.{norm}'),
        'tie_embeddings': 'output.weight' not in shapes,
        'max_positions': max_positions,
    }
    if metadata.kind == 'deepseek2':
        return model
    head_dim = metadata.integer('attention.key_length', dim // heads)
    if metadata.integer('attention.value_length', head_dim) != head_dim:
        raise metadata.error('attention.value_length', f'must equal attention.key_length={head_dim}; use another model')
    return model | {'num_kv_heads': metadata.integer('attention.head_count_kv', heads), 'head_dim': head_dim}


def _biases(shapes: Mapping[str, tuple[int, ...]], supported: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the settings of biases, which the names of the tensors have. `supported` is `Architecture.biases`."""
    names = {re.sub(r'^blk\.\d+\.', '', name) for name in shapes}
    found = {part: any(f'{name}.bias' in names for name in _BIASES.get(part, ())) for part in supported}
    parts = {part: found[part] if isinstance(value, tuple) else value for part, value in supported.items()}
    if 'norm' in parts:
        parts['norm'] = True
    uses_all = all(parts.values())
    return {'use_bias': uses_all, **{f'{part}_bias': value and not uses_all for part, value in parts.items()}}


def _windows(metadata: Metadata) -> dict[str, Any]:
    """Returns the attention pattern and the sliding window."""
    num_layers = metadata.integer('block_count')
    if metadata.kind == 'smollm3':
        return shortest_pattern(('LLLN' * num_layers)[:num_layers], 0)
    window = metadata.integer('attention.sliding_window', 0)
    listed = metadata.value('attention.sliding_window_pattern')
    if window >= metadata.integer('context_length') or metadata.kind not in _PATTERNS:
        # llama.cpp ignores windows of Llama and Qwen.
        window = 0
    if not window:
        return {'attention_pattern': 'L', 'sliding_window': 0}
    pattern = _PATTERNS[metadata.kind]
    if isinstance(listed, list):
        if len(listed) != num_layers or any(not isinstance(entry, bool) for entry in listed):
            raise metadata.error('attention.sliding_window_pattern', f'must have {num_layers} entries, true or false')
        pattern = ''.join('S' if entry else 'L' for entry in listed)
    elif listed is not None:
        pattern = 'S' * (metadata.integer('attention.sliding_window_pattern') - 1) + 'L'
    return shortest_pattern((pattern * num_layers)[:num_layers], window)


def _experts(metadata: Metadata, architecture: str) -> dict[str, Any]:
    width = 'feed_forward_length' if architecture == 'mixtral' else 'expert_feed_forward_length'
    settings = {
        'num_experts': metadata.integer('expert_count'),
        'num_experts_per_token': metadata.integer('expert_used_count'),
        'expert_ffn_dim': metadata.integer(
            'expert_feed_forward_length' if 'expert_feed_forward_length' in metadata else width
        ),
    }
    if metadata.kind == 'qwen3moe':
        settings['router_normalize'] = True
    return settings


def _granite(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    plain = model['head_dim'] ** -0.5
    multiplier = metadata.number('attention.scale', plain)
    return {
        'embedding_multiplier': metadata.number('embedding_scale', 1.0),
        'residual_multiplier': metadata.number('residual_scale', 1.0),
        'attention_multiplier': 0.0 if math.isclose(multiplier, plain, rel_tol=1e-6) else multiplier,
        'logits_scaling': metadata.number('logit_scale', 1.0),
    }


def _gemma(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Gemma 2 and 3. llama.cpp selects the scale of scores by the number of layers."""
    dim, heads, head_dim = model['dim'], model['num_heads'], model['head_dim']
    is_wide = model['num_layers'] == WIDE_GEMMA[metadata.kind] and dim != heads * head_dim
    settings = {
        'embedding_multiplier': dim**0.5,
        'attention_multiplier': (dim / heads) ** -0.5 if is_wide else 0.0,
    }
    caps = (50.0, 30.0) if metadata.kind == 'gemma2' else (0.0, 0.0)
    attention = metadata.number('attn_logit_softcapping', caps[0])
    settings['logit_softcap'] = metadata.number('final_logit_softcapping', caps[1])
    if metadata.kind == 'gemma3':
        # Transformers and llama.cpp do not cap the scores of Gemma 3.
        return {**settings, 'rope_local_theta': metadata.number('rope.freq_base_swa', 10_000.0)}
    local = metadata.number('rope.freq_base_swa', model['rope_theta'])
    if local != model['rope_theta']:
        raise metadata.error('rope.freq_base_swa', f'must be {model["rope_theta"]:g}, that of the other layers')
    return {**settings, 'attention_softcap': attention}


def _olmo(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    if not model['sliding_window']:
        return {}
    # Only layers with full attention scale their positions.
    return {'rope_local_theta': metadata.number('rope.freq_base_swa', model['rope_theta'])}


def _gpt_oss(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    # The file does not say that the model was trained without rounding the bounds of YaRN.
    return {'rope_truncate': False, 'ffn_dim': model['expert_ffn_dim']}


def _qwen3_moe(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    return {} if model['ffn_dim'] else {'ffn_dim': model['expert_ffn_dim']}


def _deepseek(metadata: Metadata, model: Mapping[str, Any]) -> dict[str, Any]:
    rotated = metadata.integer('rope.dimension_count')
    rank = metadata.integer('attention.kv_lora_rank')
    # Files with joint keys and values have these lengths under the plain names.
    is_latent = 'attention.key_length_mla' in metadata
    suffix = '_mla' if is_latent else ''
    for key in ('attention.key_length', 'attention.value_length', 'attention.head_count_kv'):
        metadata.value(key)
    settings = {
        'kv_lora_rank': rank,
        'q_lora_rank': metadata.integer('attention.q_lora_rank', 0),
        'qk_rope_head_dim': rotated,
        'qk_nope_head_dim': metadata.integer(f'attention.key_length{suffix}') - rotated,
        'v_head_dim': metadata.integer(f'attention.value_length{suffix}'),
        'num_shared_experts': metadata.integer('expert_shared_count', 0),
        'num_dense_layers': metadata.integer('leading_dense_block_count', 0),
        'rope_mscale_all_dim': 10 * metadata.number('rope.scaling.yarn_log_multiplier', 0.0),
    }
    if model['rope_scaling'] == 'yarn':
        settings['rope_attention_factor'] = 1.0
    for key in ('expert_feed_forward_length', 'expert_gating_func'):
        metadata.value(key)
    if not metadata.integer('expert_count', 0):
        return {**settings, 'num_shared_experts': 0, 'num_dense_layers': 0}
    is_v3 = _gating(metadata) is Gating.sigmoid
    settings['routed_scaling_factor'] = metadata.number('expert_weights_scale', 1.0)
    normalizes = metadata.flag('expert_weights_norm', is_v3)
    if is_v3:
        settings['router_normalize'] = normalizes
    elif normalizes:
        raise metadata.error('expert_weights_norm', 'not supported with softmax gating; use another model')
    groups = metadata.integer('expert_group_count', 0) or 1
    return settings | {
        'num_expert_groups': groups,
        'num_groups_per_token': metadata.integer('expert_group_used_count', 0) or groups,
    }


_SETTINGS = {
    'granite': _granite,
    'gemma2': _gemma,
    'gemma3': _gemma,
    'olmo2': _olmo,
    'gpt-oss': _gpt_oss,
    'qwen3moe': _qwen3_moe,
    'deepseek2': _deepseek,
}
