"""Converts between the config.json of an architecture and `model.*`.

Import selects the architecture by the file's model_type. Export selects the first architecture that can express the
model's settings, regardless of the name of its family.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from maxlm.config.resolve import config_for_model
from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.architectures.architecture import (
    GPT2,
    GPT_NEOX,
    NANOCHAT,
    QWEN3,
    Architecture,
    same_rotated_dims,
    stated,
)
from maxlm.huggingface.architectures.dense import GEMMA3, QWEN2, SMOLLM3
from maxlm.huggingface.architectures.experts import DEEPSEEK_V2
from maxlm.huggingface.architectures.reward_models import class_name_of, is_reward_model, label_keys
from maxlm.huggingface.architectures.table import ARCHITECTURES, DEFAULT_ARCHITECTURES
from maxlm.huggingface.config_fields import Fields, display_value
from maxlm.huggingface.numbers import NUMBERS
from maxlm.huggingface.rope import from_rope, to_rope
from maxlm.huggingface.tensors.dequantize import METHODS
from maxlm.log import warn_once

_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
_DTYPES = ('float32', 'bfloat16', 'float16', 'float64', 'float8_e4m3fn', 'float8_e5m2')
_EXPERTS = ('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts')


def check_supported(config: Fields, supported: Iterable[str]) -> None:
    """Raises InputError unless a config.json has a supported model type and requires no unsupported features."""
    values, source = config.values, config.source
    kind = values.get('model_type')
    if not isinstance(kind, str):
        raise InputError(f'{source}: model_type is missing; set it to one of {", ".join(supported)}')
    quantization = values.get('quantization_config') or {}
    if not isinstance(quantization, dict):
        raise config.error('quantization_config', 'must be a JSON object')
    method = quantization.get('quant_method')
    if quantization and method not in METHODS:
        raise InputError(
            f'{source}: quantization_config: quant_method={method!r:.100} is not supported; use float weights, or '
            f'weights in {" or ".join(METHODS)}'
        )
    for key, default in (('is_causal', True), ('per_layer_config', None)):
        if values.get(key, default) not in (default, None, {}):
            raise config.error(key, f'not supported; use a model without {key}, or with {key}={json.dumps(default)}')
    if kind in ARCHITECTURES and not ARCHITECTURES[kind].expert_keys:
        for key in _EXPERTS:
            if config.integer(key, 0, null=0):
                raise config.error(key, f'{kind} models have no experts; set it to 0')
    attention = values.get('attn_config')
    if kind == 'bloom' or values.get('alibi') or (isinstance(attention, dict) and attention.get('alibi')):
        raise InputError(
            f'{source}: model_type={kind}: ALiBi positions are not supported; use a model with other positions'
        )
    if kind not in supported:
        raise InputError(f'{source}: model_type={kind} is not supported; use one of {", ".join(supported)}')
    if values.get('auto_map'):
        # Published Phi-3 and DeepSeek models name the code that preceded their classes in Transformers.
        warn_once(
            f'{source}: auto_map names custom code, which maxlm ignores, like Transformers without trust_remote_code; '
            f'the model is read as {kind}'
        )


AUTO = 'auto'
# Null means "derived from other keys" for these keys, as 0 does in maxlm.
_NULLABLE = ('num_kv_heads', 'head_dim', 'ffn_dim', 'logit_softcap', 'attention_softcap', 'q_lora_rank')
# Null also means that there is no soft cap.
_CAPS = ('logit_softcap', 'attention_softcap')
# Scores are divided by the square root of this key.
_SCALAR = 'query_pre_attn_scalar'
# Names of rotary keys in error messages.
_ROPE_NAMES = {
    'rope_scaling_factor': 'factor',
    'partial_rotary_factor': 'rotary_pct',
    'rope_short_factors': 'short_factor',
    'rope_long_factors': 'long_factor',
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
        class_name_of(row, model)
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
    class_name_of(row, model)
    return row


def unsupported_settings(model: ModelConfig, row: Architecture) -> list[str]:
    """Returns the settings of a model that an architecture cannot express, as `model.key=value`."""
    fixed = {**row.fixed_settings, **(row.expert_settings if model.num_experts else {})}
    unsupported = [stated(model, key) for key, value in fixed.items() if getattr(model, key) != value]
    if model.activation not in row.activations.values():
        unsupported.insert(0, stated(model, 'activation'))
    unsupported += _unsupported_biases(model, row)
    return unsupported + [found for limit in row.limits if (found := limit(model))]


def _unsupported_biases(model: ModelConfig, row: Architecture) -> list[str]:
    """Returns the settings of biases that an architecture cannot express."""
    keys: dict[str, bool] = {}
    for part, value in row.biases.items():
        has_bias = model.has_bias(part)
        expected = keys.setdefault(value[0], has_bias) if isinstance(value, tuple) else value
        if has_bias != expected:
            key = 'use_bias' if model.use_bias or expected else f'{part}_bias'
            return [stated(model, key)]
    return []


def to_config(model: ModelConfig, architecture: str = AUTO) -> dict[str, Any]:
    """Returns the content of config.json for a resolved model, without the ids of special tokens and the dtype.

    Raises:
        InputError: as `choose_architecture`.
    """
    row = choose_architecture(model, architecture)
    config: dict[str, Any] = {'architectures': [class_name_of(row, model)], 'model_type': row.model_type}
    config |= label_keys(model)
    keys = {**row.keys, **(row.expert_keys if model.num_experts else {})}
    config |= {hf_key: getattr(model, key) for key, (hf_key, _) in keys.items()}
    config |= {row.keys[key][0]: getattr(model, key) or None for key in _CAPS if key in row.keys}
    if 'attention_multiplier' in row.keys:
        multiplier = model.attention_multiplier or model.head_dim**-0.5
        hf_key, _ = row.keys['attention_multiplier']
        config[hf_key] = round(multiplier**-2) if hf_key == _SCALAR else multiplier
    names = (hf_key for hf_key, key in row.activations.items() if key == model.activation)
    config |= {value[0]: model.has_bias(part) for part, value in row.biases.items() if isinstance(value, tuple)}
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
    check_supported(Fields(config, source), ARCHITECTURES)
    row = ARCHITECTURES[config['model_type']]
    config = {**config, **{key: config[alias] for alias, key in row.aliases.items() if alias in config}}
    fields = Fields(config, source)
    for key in _IDS:
        fields.check_ids(key, may_be_list=key == 'eos_token_id')
    model: dict[str, Any] = {'family': row.family, **row.fixed_settings, **_biases(fields, row)}
    model['reward_head'] = is_reward_model(config, source)
    keys = dict(row.keys)
    if _has_experts(fields, row):
        keys |= row.expert_keys
        model |= row.expert_settings
        if row is DEEPSEEK_V2 and not _limits_groups(fields):
            # Transformers ignores the groups.
            keys = {key: names for key, names in keys.items() if names[0] not in ('n_group', 'topk_group')}
    kinds = typing.get_type_hints(ModelConfig)
    for key, (hf_key, fallback) in keys.items():
        null = 0 if key in _NULLABLE else None
        if hf_key not in config and fallback is None:
            model[key] = 0
        else:
            read: Any = {int: fields.integer, float: fields.number, bool: fields.flag}[kinds[key]]
            model[key] = read(hf_key, fallback) if null is None else read(hf_key, fallback, null=null)
    for hf_key, value in row.fixed_keys.items():
        found = config.get(hf_key, value)
        if found != value and not (found is None and not value):
            raise fields.error(hf_key, f'only {value} is supported for this model')
    name = fields.text(*row.activation)
    if name not in row.activations:
        raise fields.error(row.activation[0], f'not supported; use one of {", ".join(row.activations)}')
    model['activation'] = row.activations[name]
    if 'attention_multiplier' in row.keys:
        multiplier = model['attention_multiplier']
        multiplier = multiplier**-0.5 if row.keys['attention_multiplier'][0] == _SCALAR else multiplier
        head_dim = model['head_dim'] or max(1, model['dim'] // model['num_heads'])
        model['attention_multiplier'] = 0.0 if multiplier == head_dim**-0.5 else multiplier
    elif row is GPT2:
        model['attention_multiplier'] = 0.0 if fields.flag('scale_attn_weights', True) else 1.0
    if 'ffn_dim' not in keys:
        # All layers have experts.
        model['ffn_dim'] = model['expert_ffn_dim'] if row.expert_keys else 0
    if model['position_embedding'] == 'rotary':
        model |= from_rope(fields, row.model_type, model['max_positions'])
        head_dim, fraction = model['dim'] // model['num_heads'], model['partial_rotary_factor']
        if fraction != 1 and not same_rotated_dims(head_dim, fraction):
            fraction_key = 'rotary_pct' if row is GPT_NEOX else 'partial_rotary_factor'
            raise InputError(
                f'{source}: {fraction_key}={fraction}: rotates {head_dim * fraction:g} of {head_dim} head dims; must '
                'be an even number of dims'
            )
    model |= _attention(fields, row, model['num_layers'])
    # The dtype of the stored parameters; the default of Transformers is float32.
    key = 'dtype' if config.get('dtype') else 'torch_dtype'
    stored_dtype = fields.text(key, 'float32') if config.get(key) else 'float32'
    if stored_dtype.removeprefix('torch.') not in _DTYPES:
        raise fields.error(key, f'not supported; use one of {", ".join(_DTYPES)}')
    model['dtype'] = 'float32' if stored_dtype.endswith('float32') else 'bfloat16'
    try:
        resolved = config_for_model(model, source).model
    except InputError as error:
        raise InputError(_with_hf_names(str(error), row)) from error
    for hf_key, number in NUMBERS.items():
        value = config.get(hf_key)
        if hf_key not in _IDS and value is not None and value not in number:
            warn_once(
                f'{source}: {hf_key}={display_value(value)} is not {number}; {row.model_type} models ignore the key in '
                'Transformers, and so does maxlm'
            )
    return resolved


def _with_hf_names(message: str, row: Architecture) -> str:
    """Returns a message about keys of maxlm with the keys of config.json."""
    names = _ROPE_NAMES | {key: hf_key for key, (hf_key, _) in (*row.keys.items(), *row.expert_keys.items())}
    return re.sub(r'\bmodel\.(\w+)', lambda match: names.get(match[1], match[0]), message)


def _has_experts(fields: Fields, row: Architecture) -> bool:
    if 'num_dense_layers' not in row.expert_keys:
        return bool(row.expert_keys)
    hf_key, fallback = row.expert_keys['num_dense_layers']
    return fields.integer(hf_key, fallback) < fields.integer(*row.keys['num_layers'])


def _limits_groups(fields: Fields) -> bool:
    method = fields.text('topk_method', 'greedy')
    if method not in ('greedy', 'group_limited_greedy'):
        raise fields.error('topk_method', 'not supported; use greedy or group_limited_greedy')
    return method == 'group_limited_greedy'


def _biases(fields: Fields, row: Architecture) -> dict[str, bool]:
    parts = {part: fields.flag(*value) if isinstance(value, tuple) else value for part, value in row.biases.items()}
    uses_all = all(parts.values())
    return {'use_bias': uses_all, **{f'{part}_bias': value and not uses_all for part, value in parts.items()}}


def _attention(fields: Fields, row: Architecture, num_layers: int) -> dict[str, Any]:
    """Returns the attention pattern and the sliding window."""
    if row is SMOLLM3:
        return shortest_pattern(_rotated(fields, num_layers), 0)
    sliding_window, is_qwen = 0, row in (QWEN2, QWEN3)
    if row.sliding_window is not None or (is_qwen and fields.flag('use_sliding_window', False)):
        default = 4096 if row.sliding_window is None else row.sliding_window
        sliding_window = fields.integer('sliding_window', default, null=0)
    first = fields.integer('max_window_layers', 28) if is_qwen else 0
    sliding = [sliding_window > 0 and layer >= first for layer in range(num_layers)]
    if row.pattern:
        # The former key of Gemma 3: every n-th layer is full.
        period = len(row.pattern)
        if row is GEMMA3:
            period = fields.integer('sliding_window_pattern', period, null=period)
        sliding = [(layer + 1) % period > 0 for layer in range(num_layers)]
    types = fields.values.get('layer_types')
    if types is not None:
        names = ['full_attention', 'sliding_attention']
        if not isinstance(types, list) or len(types) != num_layers or any(name not in names for name in types):
            raise fields.error('layer_types', f'must have {num_layers} entries, each {" or ".join(names)}')
        listed = [name == 'sliding_attention' for name in types]
        if not is_qwen and not row.pattern and listed != sliding:
            raise fields.error(
                'layer_types', f'{row.model_type} supports only one type of layer; use one type for all layers'
            )
        sliding = listed
    if any(sliding) and not sliding_window:
        if types is None:
            raise fields.error('sliding_window', f'must be {NUMBERS["sliding_window"]}')
        raise fields.error('layer_types', 'sliding_attention requires a window; set sliding_window')
    return shortest_pattern(''.join('S' if slides else 'L' for slides in sliding), sliding_window)


def _rotated(fields: Fields, num_layers: int) -> str:
    """Returns the letter of each layer of a SmolLM3 config: N without rotary positions."""
    interval = fields.integer('no_rope_layer_interval', 4)
    rotated = fields.values.get('no_rope_layers')
    if rotated is None:
        rotated = [int((layer + 1) % interval > 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or any(entry not in (0, 1) for entry in rotated):
        raise fields.error('no_rope_layers', f'must have {num_layers} entries, each 0 or 1')
    types = fields.values.get('layer_types') or []
    if not isinstance(types, list) or any(name != 'full_attention' for name in types):
        raise fields.error('layer_types', 'smollm3 supports only full_attention here; use it for all layers')
    return ''.join('L' if entry else 'N' for entry in rotated[:num_layers])


def shortest_pattern(letters: str, sliding_window: int) -> dict[str, Any]:
    """Returns the pattern of the letters of all layers, and the window if there is one."""
    # The shortest pattern that repeats to all layers, because one period of it is compiled.
    num_layers = len(letters)
    period = next(n for n in range(1, num_layers + 1) if letters == (letters[:n] * num_layers)[:num_layers])
    return {'attention_pattern': letters[:period], 'sliding_window': sliding_window if 'S' in letters else 0}
