"""Converts between the config.json of an architecture and `model.*`.

Import selects the architecture by the file's model_type. Export selects the first architecture that can express the
model's settings, regardless of the name of its family.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from maxlm.config.resolve import config_for_model
from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V3,
    DEFAULT_ARCHITECTURES,
    GPT_NEOX,
    LLAMA,
    MISTRAL,
    NANOCHAT,
    QWEN3,
    Architecture,
    same_rotated_dims,
    stated,
)
from maxlm.huggingface.json_fields import Fields
from maxlm.huggingface.rope import from_rope, to_rope
from maxlm.huggingface.tensors.dequantize import METHODS

_EXPERTS = ('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts')
_EXPERT_TYPES = ('mixtral', 'dbrx', 'jetmoe', 'deepseek_v2', 'gpt_oss', 'llama4')


def check_supported(config: Fields, supported: Iterable[str]) -> None:
    """Raises InputError unless a config.json has a supported model type and requires no unsupported features."""
    values, source = config.values, config.source
    kind = values.get('model_type')
    if not isinstance(kind, str):
        raise InputError(f'{source}: model_type is missing; set it to one of {", ".join(supported)}')
    if values.get('auto_map'):
        raise config.error(
            'auto_map', 'the model requires custom code, which maxlm does not run; use a model without auto_map'
        )
    quantization = values.get('quantization_config') or {}
    if not isinstance(quantization, dict):
        raise config.error('quantization_config', 'must be a JSON object')
    method = quantization.get('quant_method')
    if quantization and method not in METHODS:
        raise InputError(
            f'{source}: quantization_config: quant_method={method!r:.100} is not supported; use float weights, or '
            f'weights in {" or ".join(METHODS)}'
        )
    reason = 'mixture-of-experts models are not supported; use a dense model'
    if kind == DEEPSEEK_V3.model_type:
        # The first layers have no experts, whatever the number of experts is.
        if config.integer('first_k_dense_replace', 3) < config.integer('num_hidden_layers', 61):
            raise config.error('first_k_dense_replace', f'{reason}, in which it equals num_hidden_layers')
    else:
        for key in _EXPERTS:
            if config.integer(key, 0, null=0):
                raise config.error(key, reason)
    if kind in _EXPERT_TYPES or 'moe' in kind:
        raise InputError(f'{source}: model_type={kind}: mixture-of-experts models are not supported; use a dense model')
    attention = values.get('attn_config')
    if kind == 'bloom' or values.get('alibi') or (isinstance(attention, dict) and attention.get('alibi')):
        raise InputError(
            f'{source}: model_type={kind}: ALiBi positions are not supported; use a model with other positions'
        )
    if kind not in supported:
        raise InputError(f'{source}: model_type={kind} is not supported; use one of {", ".join(supported)}')


AUTO = 'auto'
# Null means "derived from other keys" for these keys, as 0 does in maxlm.
_NULLABLE = ('num_kv_heads', 'head_dim', 'ffn_dim', 'logit_softcap', 'q_lora_rank')
# Names of rotary keys in error messages.
_ROPE_NAMES = {
    'rope_scaling_factor': 'factor',
    # Only GPT-NeoX supports rotating a part of a head.
    'partial_rotary_factor': 'rotary_pct',
    'rope_low_freq_factor': 'low_freq_factor',
    'rope_high_freq_factor': 'high_freq_factor',
    'rope_beta_slow': 'beta_slow',
    'rope_beta_fast': 'beta_fast',
    'original_max_positions': 'original_max_position_embeddings',
}


def choose_architecture(model: ModelConfig, architecture: str = AUTO) -> Architecture:
    """Returns the architecture for the export of a resolved model: the requested one, or the first that can express it.

    Raises:
        InputError: no architecture can express the model. The message lists the settings that the closest one lacks.
    """
    if architecture != AUTO:
        row = ARCHITECTURES[architecture]
        missing = unsupported_settings(model, row)
        if missing:
            raise InputError(
                f'{", ".join(missing)}: {row.class_name} cannot express this model; use --architecture={AUTO}'
            )
        return row
    # Prefer the architecture with the name of the family.
    rows = sorted(DEFAULT_ARCHITECTURES, key=lambda row: row.model_type != model.family)
    row = min(rows, key=lambda row: len(unsupported_settings(model, row)))
    missing = unsupported_settings(model, row)
    if missing:
        others = ', '.join(served.title for served in DEFAULT_ARCHITECTURES[:-1])
        hint = ''
        if not unsupported_settings(model, NANOCHAT):
            hint = '; use --architecture=nanochat, which only Transformers 5 or later can run'
        raise InputError(
            f'{", ".join(missing)}: none of {others} and {DEFAULT_ARCHITECTURES[-1].title} can express this model; '
            f'{row.title} is the closest{hint}'
        )
    return row


def unsupported_settings(model: ModelConfig, row: Architecture) -> list[str]:
    """Returns the settings of a model that an architecture cannot express, as `model.key=value`."""
    unsupported = [stated(model, key) for key, value in row.fixed_settings.items() if getattr(model, key) != value]
    if model.activation not in row.activations.values():
        unsupported.insert(0, stated(model, 'activation'))
    return unsupported + [found for limit in row.limits if (found := limit(model))]


def to_config(model: ModelConfig, architecture: str = AUTO) -> dict[str, Any]:
    """Returns the content of config.json for a resolved model, without the ids of special tokens and the dtype.

    Raises:
        InputError: as `choose_architecture`.
    """
    row = choose_architecture(model, architecture)
    config: dict[str, Any] = {'architectures': [row.class_name], 'model_type': row.model_type}
    config |= {hf_key: getattr(model, key) for key, (hf_key, _) in row.keys.items()}
    if row is NANOCHAT:
        config['final_logit_softcapping'] = model.logit_softcap or None
    names = (hf_key for hf_key, key in row.activations.items() if key == model.activation)
    config |= {row.activation[0]: next(names), **row.fixed_keys, **row.extra_keys(model)}
    return config | (to_rope(model, row.model_type) if model.position_embedding == 'rotary' else {})


def from_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Returns the resolved model of a config.json.

    Args:
        config: content of the file.
        source: name of the file in error messages.

    Raises:
        InputError: the model is not supported, or a value is invalid. The message names the keys.
    """
    fields = Fields(config, source)
    row = _architecture(fields)
    model: dict[str, Any] = {'family': row.family, **row.fixed_settings}
    kinds = typing.get_type_hints(ModelConfig)
    for key, (hf_key, fallback) in row.keys.items():
        null = 0 if key in _NULLABLE else None
        if hf_key not in config and fallback is None:
            model[key] = 0
        else:
            read: Any = {int: fields.integer, float: fields.number, bool: fields.flag}[kinds[key]]
            model[key] = read(hf_key, fallback) if null is None else read(hf_key, fallback, null=null)
    for hf_key, value in row.fixed_keys.items():
        if config.get(hf_key, value) != value:
            raise fields.error(hf_key, f'only {value} is supported for this model')
    name = fields.text(*row.activation)
    if name not in row.activations:
        raise fields.error(row.activation[0], f'not supported; use one of {", ".join(row.activations)}')
    model['activation'] = row.activations[name]
    if row is LLAMA and fields.flag('mlp_bias', False) != model['use_bias']:
        raise fields.error(
            'mlp_bias', f'differs from attention_bias={model["use_bias"]}; only equal values are supported'
        )
    if model['position_embedding'] == 'rotary':
        model |= from_rope(fields, row.model_type, model['max_positions'])
        head_dim, fraction = model['dim'] // model['num_heads'], model['partial_rotary_factor']
        if row is GPT_NEOX and not same_rotated_dims(head_dim, fraction):
            raise InputError(
                f'{source}: rotary_pct={fraction}: rotates {head_dim * fraction:g} of {head_dim} head dims; must be '
                'an even number of dims'
            )
    model |= _attention(fields, row, model['num_layers'])
    # The dtype of the stored parameters; the default of Transformers is float32.
    stored_dtype = str(config.get('dtype') or config.get('torch_dtype') or 'float32')
    model['dtype'] = 'float32' if stored_dtype.endswith('float32') else 'bfloat16'
    try:
        return config_for_model(model, source).model
    except InputError as error:
        raise InputError(_with_hf_names(str(error), row)) from error


def _with_hf_names(message: str, row: Architecture) -> str:
    """Returns a message about keys of maxlm with the keys of config.json."""
    names = _ROPE_NAMES | {key: hf_key for key, (hf_key, _) in row.keys.items()}
    return re.sub(r'\bmodel\.(\w+)', lambda match: names.get(match[1], match[0]), message)


def _architecture(fields: Fields) -> Architecture:
    check_supported(fields, ARCHITECTURES)
    return ARCHITECTURES[fields.text('model_type', '')]


def _attention(fields: Fields, row: Architecture, num_layers: int) -> dict[str, Any]:
    """Returns the attention pattern and the sliding window."""
    window = 0
    if row is MISTRAL or (row is QWEN3 and fields.flag('use_sliding_window', False)):
        window = fields.integer('sliding_window', 4096, null=0)
    first = fields.integer('max_window_layers', 28) if row is QWEN3 else 0
    sliding = [window > 0 and layer >= first for layer in range(num_layers)]
    types = fields.values.get('layer_types')
    if types is not None:
        names = ['full_attention', 'sliding_attention']
        if not isinstance(types, list) or len(types) != num_layers or any(name not in names for name in types):
            raise fields.error('layer_types', f'must have {num_layers} entries, each {" or ".join(names)}')
        listed = [name == 'sliding_attention' for name in types]
        if any(listed) and not window:
            raise fields.error('layer_types', 'sliding_attention requires a window; set sliding_window')
        if row is not QWEN3 and listed != sliding:
            raise fields.error(
                'layer_types', f'{row.model_type} supports only one type of layer; use one type for all layers'
            )
        sliding = listed
    if not any(sliding):
        return {'attention_pattern': 'L', 'sliding_window': 0}
    letters = ''.join('S' if slides else 'L' for slides in sliding)
    # The shortest pattern that repeats to all layers, because one period of it is compiled.
    period = next(n for n in range(1, num_layers + 1) if letters == (letters[:n] * num_layers)[:num_layers])
    return {'attention_pattern': letters[:period], 'sliding_window': window}
