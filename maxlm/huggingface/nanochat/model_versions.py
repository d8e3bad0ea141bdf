"""Maps the configs and tensors of nanochat's checkpoints to models of maxlm, and back.

The files state only the sizes of their model, and nanochat changed its formulas several times. The names of the
tensors identify two models: that of 2025-10-13 to 2026-01-11, and that since 2026-03-14. Names and formulas are those
of `nanochat/gpt.py`.

Shapes: L layers, V vocabulary, K key/value heads, W = K · head dim, C channels of a gate.
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
from maxlm.huggingface.architectures.reward_models import check_language_model
from maxlm.huggingface.config_conversion import shortest_pattern
from maxlm.huggingface.config_fields import Fields, display_value
from maxlm.huggingface.state_dict import Tensor, tensors
from maxlm.model.value_embedding import VALUE_GATES, VALUE_TABLES, value_layers
from maxlm.workdir.files import model_difference

# Since 2025-12-09, files have rows for a multiple of 64 ids. The rows beyond the vocabulary are not used.
PADDING = 64
# F.rms_norm adds the machine epsilon of float32 unless it gets another epsilon.
NORM_EPSILON = float(np.finfo(np.float32).eps)
# A difference of the epsilons up to this value changes only activations below 0.01 by more than rounding.
_MAX_EPSILON = 1e-5
EMBEDDING = 'transformer.wte.weight'
# Parameters with a row per id.
_TABLES = ('embedding', 'head.kernel')
# Keys of `model_config` and of maxlm.
KEYS = {
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
# Channels of the inputs of the gates.
_SMEAR_CHANNELS, _VALUE_CHANNELS = 24, 12
# Tensors and parameters outside of the layers.
_OUTER = {
    'resid_lambdas': 'residual_scales',
    'x0_lambdas': 'embedding_scales',
    'smear_lambda': 'smear_scale',
    'backout_lambda': 'backout_scale',
}
# Keys that change neither the function of a model nor its merged and dequantized parameters.
_NO_FUNCTION = (
    *('lora_rank', 'lora_alpha', 'lora_target_modules', 'weight_quantization', 'quantization_group_size'),
    *('base_dim', 'base_num_layers'),
)


@dataclasses.dataclass(frozen=True)
class ModelVersion:
    """The model of a period of nanochat.

    Attributes:
        title: the period, for messages.
        settings: settings of the model that do not depend on its sizes.
        has_windows: the config has a pattern of layers with sliding windows.
    """

    title: str
    settings: Mapping[str, Any]
    has_windows: bool


FIRST = ModelVersion('nanochat of 2025', {'rope_theta': 10_000.0}, has_windows=False)
PRESENT = ModelVersion(
    'nanochat since 2026-03-14',
    {
        'rope_theta': 100_000.0,
        # Queries and keys are multiplied by 1.2 after their norms.
        'relative_attention_multiplier': 1.44,
        'residual_scale': True,
        'embedding_residual': True,
        'smear_channels': _SMEAR_CHANNELS,
        'value_gate_channels': _VALUE_CHANNELS,
    },
    has_windows=True,
)


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
    if missing := [key for key in KEYS if key not in values]:
        raise InputError(f'{source}: model_config has no {missing[0]}; use meta_NNNNNN.json of the same step')
    if unknown := [key for key in values if key not in (*KEYS, _PATTERN)]:
        raise InputError(
            f'{source}: model_config has the key {display_value(unknown[0])}, which maxlm does not know; use a '
            'checkpoint of karpathy/nanochat'
        )
    fields = Fields(values, source)
    settings: dict[str, Any] = {key: fields.integer(name, 0) for name, key in KEYS.items()}
    if settings['dim'] % settings['num_heads']:
        raise fields.error('n_head', f'must divide n_embd={settings["dim"]}')
    layers = {match[1] for name in shapes if (match := re.match(r'transformer\.h\.(\d{1,4})\.', name))}
    if len(layers) != settings['num_layers']:
        raise fields.error('n_layer', f'but the tensors have {len(layers)} layers; use the meta file of the same step')
    version = _version(shapes, source)
    pattern = fields.text(_PATTERN, 'L').upper()
    if not pattern or not set(pattern) <= set('LS' if version.has_windows else 'L'):
        raise fields.error(_PATTERN, f'not a pattern of {version.title}; use the meta file of the same step')
    return config_for_model(_settings(settings, version, pattern, dtype), source)


def _version(shapes: Mapping[str, tuple[int, ...]], source: str) -> ModelVersion:
    added = sorted(name for name in shapes if re.match(r'resid_|x0_|smear_|backout_|value_embeds\.', name))
    if not added:
        return FIRST
    if 'smear_gate.weight' not in shapes:
        raise InputError(
            f'{source}: the checkpoint has the tensor {added[0]} but no smear_gate.weight, so it is of nanochat '
            'between 2026-01-11 and 2026-03-14, whose formulas changed without a mark in the files; use another one'
        )
    return PRESENT


def _settings(sizes: Mapping[str, Any], version: ModelVersion, pattern: str, dtype: str) -> dict[str, Any]:
    """Returns the settings of a model from its sizes and its pattern of layers."""
    L, length = sizes['num_layers'], sizes['max_positions']
    # The last layer has no window. A window excludes the token itself in nanochat, and is a quarter of the length,
    # rounded up to a multiple of 128.
    window = -(-length // (4 * 128)) * 128 + 1
    letters = ((pattern[:L] * L)[: L - 1] + 'L') if window < length else L * 'L'
    of_layers = {'backout_layer': L // 2, 'value_embedding_pattern': 'NV'[-L:]} if version is PRESENT else {}
    return {
        'family': 'nanochat',
        **sizes,
        'head_dim': sizes['dim'] // sizes['num_heads'],
        'ffn_dim': 4 * sizes['dim'],
        'norm_epsilon': NORM_EPSILON,
        'dtype': dtype,
        **shortest_pattern(letters, window),
        **of_layers,
        **version.settings,
    }


def model_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the `model_config` of a resolved model for a meta_NNNNNN.json.

    Raises:
        InputError: nanochat cannot express the model. The message names a key.
    """
    check_language_model(model, 'nanochat')
    sizes = {key: getattr(model, key) for key in KEYS.values()}
    version = PRESENT if model.residual_scale or model.smear_channels or model.value_embedding_pattern else FIRST
    pattern = model.attention_pattern.replace('N', 'L') if version.has_windows else 'L'
    expected = config_for_model(_settings(sizes, version, pattern, model.dtype), 'nanochat')
    defaults = {key: getattr(expected.model, key) for key in _NO_FUNCTION}
    if abs(model.norm_epsilon - NORM_EPSILON) <= _MAX_EPSILON:
        defaults['norm_epsilon'] = NORM_EPSILON
    comparable = dataclasses.replace(model, **defaults)
    if found := model_difference(expected, dataclasses.replace(expected, model=comparable)):
        key, value, actual = found
        raise InputError(f'{key}={actual}: {version.title} has {key}={value}; export the model in another format')
    settings = {name: sizes[key] for name, key in KEYS.items()}
    return {**settings, _PATTERN: model.attention_pattern} if version.has_windows else settings


def file_tensors(model: ModelConfig, rows: int) -> list[Tensor]:
    """Returns the tensors of the file of a resolved model.

    Args:
        model: a model that `read_config` returns or `model_config` accepts.
        rows: number of rows of the tables, at least the size of the vocabulary.
    """
    own = [tensor._replace(name=_renamed(tensor.name)) for tensor in tensors('nanochat', model)]
    padded = [_padded(tensor, rows) if tensor.sources[0] in _TABLES else tensor for tensor in own]
    return [*padded, *_added_tensors(model, rows)] if model.smear_channels else padded


def _added_tensors(model: ModelConfig, rows: int) -> list[Tensor]:
    """Returns the tensors that nanochat has since 2026-03-14."""
    L, C, K, gate = model.num_layers, model.smear_channels, model.num_kv_heads, model.value_gate_channels
    shapes = {name: (L,) if name in ('resid_lambdas', 'x0_lambdas') else (1,) for name in _OUTER}
    added = [_tensor(name, source, shapes[name], shapes[name]) for name, source in _OUTER.items()]
    added.append(_tensor('smear_gate.weight', 'smear_gate', (1, C), (C,)))
    with_values = [layer for layer, has_value in enumerate(value_layers(model)) if has_value]
    for index, layer in enumerate(with_values):
        table = (model.vocab_size, K * model.head_dim)
        added.append(_padded(_tensor(f'value_embeds.{layer}.weight', VALUE_TABLES, table, table, index), rows))
        gates = _tensor(f'transformer.h.{layer}.attn.ve_gate.weight', VALUE_GATES, (K, gate), (gate, K), index)
        added.append(gates._replace(to_hf=lambda arrays: arrays[0].T, from_hf=lambda array: [array.T]))
    return added


def _tensor(
    name: str, source: str, shape: tuple[int, ...], source_shape: tuple[int, ...], layer: int | None = None
) -> Tensor:
    """Returns a tensor of one parameter, reshaped."""
    return Tensor(
        name,
        shape,
        (source,),
        (source_shape,),
        layer,
        lambda arrays: arrays[0].reshape(shape),
        lambda array: [array.reshape(source_shape)],
    )


def padded_rows(vocab_size: int) -> int:
    """Returns the number of rows of the tables in a file."""
    return -(-vocab_size // PADDING) * PADDING


def _renamed(name: str) -> str:
    for part, replacement in _NAMES.items():
        name = name.replace(part, replacement)
    return name


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Returns a tensor with a row per id with zeros for the ids beyond the vocabulary."""
    used = tensor.shape[0]
    return tensor._replace(
        shape=(rows, *tensor.shape[1:]),
        to_hf=lambda arrays: np.pad(tensor.to_hf(arrays), ((0, rows - used), (0, 0))),
        from_hf=lambda array: tensor.from_hf(array[:used]),
    )
