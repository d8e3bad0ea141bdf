"""Maps the configs and tensors of nanochat's checkpoints to models of maxlm, and back.

The files do not state the formulas of their model, only sizes. Checkpoints without learned scales are of the model of
2025. Names and formulas: `nanochat/gpt.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxlm.config.resolve import config_for_model
from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.config_conversion import shortest_pattern
from maxlm.huggingface.config_fields import Fields, display_value
from maxlm.huggingface.state_dict import Tensor, tensors
from maxlm.workdir.files import model_difference

# Since 2025-12-09, files have rows for a multiple of 64 ids. The rows beyond the vocabulary are not used.
PADDING = 64
# F.rms_norm adds the machine epsilon of float32 unless it gets another epsilon.
NORM_EPSILON = float(np.finfo(np.float32).eps)
# A difference of the epsilons up to this value changes only activations below 0.01 by more than rounding.
_MAX_EPSILON = 1e-5
EMBEDDING = 'transformer.wte.weight'
# Keys of `model_config` and of maxlm.
_KEYS = {
    'sequence_len': 'max_positions',
    'vocab_size': 'vocab_size',
    'n_layer': 'num_layers',
    'n_head': 'num_heads',
    'n_kv_head': 'num_kv_heads',
    'n_embd': 'dim',
}
_PATTERN = 'window_pattern'
# Parts of names in Transformers and in nanochat.
_NAMES = {
    'model.embed_tokens.': 'transformer.wte.',
    'model.layers.': 'transformer.h.',
    'self_attn.q_proj': 'attn.c_q',
    'self_attn.k_proj': 'attn.c_k',
    'self_attn.v_proj': 'attn.c_v',
    'self_attn.o_proj': 'attn.c_proj',
    'mlp.fc1': 'mlp.c_fc',
    'mlp.fc2': 'mlp.c_proj',
}
# Keys that change neither the function of a model nor its merged and dequantized parameters.
_NO_FUNCTION = ('lora_rank', 'lora_alpha', 'lora_target_modules', 'weight_quantization', 'quantization_group_size')


@dataclasses.dataclass(frozen=True)
class Layout:
    """The model of a period of nanochat.

    Attributes:
        title: the period, for messages.
        settings: settings of the model in addition to its sizes.
    """

    title: str
    settings: Mapping[str, Any]


FIRST = Layout('nanochat of 2025', {'rope_theta': 10_000.0})


def read_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: str, source: str) -> Config:
    """Returns the resolved config of the model of a checkpoint.

    Args:
        meta: content of its meta_NNNNNN.json.
        shapes: names and shapes of its tensors.
        dtype: compute dtype of the model.
        source: path of the meta file in error messages.

    Raises:
        InputError: a value is missing or out of range, or the model is not supported.
    """
    values = meta.get('model_config')
    if not isinstance(values, dict):
        raise InputError(f'{source}: has no model_config; use meta_NNNNNN.json of the same step')
    if missing := [key for key in _KEYS if key not in values]:
        raise InputError(f'{source}: model_config has no {missing[0]}; use meta_NNNNNN.json of the same step')
    if unknown := [key for key in values if key not in (*_KEYS, _PATTERN)]:
        raise InputError(
            f'{source}: model_config has the key {display_value(unknown[0])}, which maxlm does not know; use a '
            'checkpoint of karpathy/nanochat'
        )
    fields = Fields(values, source)
    settings: dict[str, Any] = {key: fields.integer(name, 0) for name, key in _KEYS.items()}
    if settings['dim'] % settings['num_heads']:
        raise fields.error('n_head', f'must divide n_embd={settings["dim"]}')
    layers = {match[1] for name in shapes if (match := re.match(r'transformer\.h\.(\d{1,4})\.', name))}
    if len(layers) != settings['num_layers']:
        raise fields.error('n_layer', f'but the tensors have {len(layers)} layers; use the meta file of the same step')
    layout = _layout(shapes, source)
    pattern = fields.text(_PATTERN, 'L')
    if set(pattern) != {'L'}:
        raise fields.error(_PATTERN, f'not supported for {layout.title}; use a checkpoint of {layout.title}')
    model = _settings(settings, layout, settings['num_layers'] * 'L', dtype)
    return config_for_model(model, source)


def _layout(shapes: Mapping[str, tuple[int, ...]], source: str) -> Layout:
    added = sorted(name for name in shapes if re.match(r'resid_|x0_|smear_|backout_|value_embeds\.', name))
    if added:
        raise InputError(
            f'{source}: the tensor {added[0]} is of nanochat since 2026-01-11, which is not supported; use one '
            'of an earlier nanochat'
        )
    return FIRST


def _settings(sizes: Mapping[str, Any], layout: Layout, letters: str, dtype: str) -> dict[str, Any]:
    """Returns the settings of a model from its sizes and the letters of its layers."""
    return {
        'family': 'nanochat',
        **sizes,
        'head_dim': sizes['dim'] // sizes['num_heads'],
        'ffn_dim': 4 * sizes['dim'],
        'norm_epsilon': NORM_EPSILON,
        'dtype': dtype,
        **shortest_pattern(letters, 0),
        **layout.settings,
    }


def model_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the `model_config` of a resolved model for a meta_NNNNNN.json.

    Raises:
        InputError: nanochat cannot express the model. The message names a key.
    """
    sizes = {key: getattr(model, key) for key in _KEYS.values()}
    expected = config_for_model(_settings(sizes, FIRST, model.num_layers * 'L', model.dtype), 'nanochat')
    defaults = {key: getattr(expected.model, key) for key in _NO_FUNCTION}
    if abs(model.norm_epsilon - NORM_EPSILON) <= _MAX_EPSILON:
        defaults['norm_epsilon'] = NORM_EPSILON
    comparable = dataclasses.replace(model, **defaults)
    if found := model_difference(expected, dataclasses.replace(expected, model=comparable)):
        key, value, actual = found
        raise InputError(f'{key}={actual}: {FIRST.title} has {key}={value}; use `maxlm hf export`')
    return {name: sizes[key] for name, key in _KEYS.items()}


def file_tensors(model: ModelConfig, rows: int) -> list[Tensor]:
    """Returns the tensors of the file of a resolved model.

    Args:
        model: a model that `read_config` returns or `model_config` accepts.
        rows: number of rows of the tables, at least the size of the vocabulary.
    """
    return [
        _padded(tensor._replace(name=_renamed(tensor.name)), model.vocab_size, rows)
        for tensor in tensors('nanochat', model)
    ]


def padded_rows(vocab_size: int) -> int:
    """Returns the number of rows of the tables in a file."""
    return -(-vocab_size // PADDING) * PADDING


def _renamed(name: str) -> str:
    for part, replacement in _NAMES.items():
        name = name.replace(part, replacement)
    return name


def _padded(tensor: Tensor, vocab_size: int, rows: int) -> Tensor:
    """Returns a tensor of the file with zeros for the ids beyond the vocabulary, if it has a row per id."""
    if tensor.layer is not None or tensor.shape[0] != vocab_size:
        return tensor
    missing = rows - vocab_size
    return tensor._replace(
        shape=(rows, *tensor.shape[1:]),
        to_hf=lambda arrays: np.pad(tensor.to_hf(arrays), ((0, missing), (0, 0))),
        from_hf=lambda array: tensor.from_hf(array[:vocab_size]),
    )
