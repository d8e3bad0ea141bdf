"""Description of an architecture of Transformers, and the architectures that maxlm supported first.

Names and defaults: `configuration_*.py` of Transformers 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from maxlm.config.schema import ArchitectureName, ModelConfig
from maxlm.model.layers.masks import layer_kinds, layer_windows

_GELUS = {
    'gelu_pytorch_tanh': 'gelu_tanh',
    'gelu_new': 'gelu_tanh',
    'gelu_fast': 'gelu_tanh',
    'gelu_accurate': 'gelu_tanh',
    'gelu_python_tanh': 'gelu_tanh',
    'gelu': 'gelu',
    'gelu_python': 'gelu',
}
# Activations of a feed-forward without and with a gate.
PLAIN = {**_GELUS, 'relu': 'relu', 'relu2': 'relu2', 'silu': 'silu', 'swish': 'silu'}
GATED = {
    'silu': 'swiglu',
    'swish': 'swiglu',
    'relu': 'reglu',
    **{name: {'gelu': 'geglu', 'gelu_tanh': 'geglu_tanh'}[kind] for name, kind in _GELUS.items()},
}


NO_BIASES: Mapping[str, bool | tuple[str, bool]] = {'qkv': False, 'out': False, 'mlp': False}
_ATTENTION_BIAS = ('attention_bias', False)
ATTENTION_BIASES = {**NO_BIASES, 'qkv': _ATTENTION_BIAS, 'out': _ATTENTION_BIAS}
SEPARATE_BIASES = {**ATTENTION_BIASES, 'mlp': ('mlp_bias', False)}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A supported architecture of Transformers.

    Attributes:
        model_type, class_name, title: names in config.json and in messages.
        family: value of `model.family`.
        keys: key of maxlm → (key of config.json, default). A default of None: the value is derived.
        activation: key of the activation in config.json, and its default.
        activations: name in config.json → name in maxlm. If several names map to one, the first is written.
        fixed_settings: maxlm settings that have only one value in this architecture.
        expert_keys, expert_settings: as `keys` and `fixed_settings`, for models with experts.
        fixed_keys: keys of config.json for which maxlm supports only one value, which is also their default.
        extra_keys: function from a model to further keys of config.json.
        sliding_window: default of `sliding_window`, which all layers have; None = there are no such layers.
        pattern: default of `layer_types`, as `model.attention_pattern`; '' = the key does not exist.
        biases: part of `ModelConfig.has_bias` → value, or key of config.json and its default.
        aliases: other names of keys in config.json (`attribute_map` of Transformers).
        limits: functions that return an unsupported setting of a model as `model.key=value`, or ''.
    """

    model_type: ArchitectureName
    class_name: str
    title: str
    family: str
    keys: Mapping[str, tuple[str, Any]]
    activation: tuple[str, str] = ('hidden_act', 'silu')
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: GATED)
    fixed_settings: Mapping[str, Any] = dataclasses.field(default_factory=lambda: RMSNORM)
    fixed_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra_keys: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    limits: tuple[Callable[[ModelConfig], str], ...] = ()
    sliding_window: int | None = None
    pattern: str = ''
    biases: Mapping[str, bool | tuple[str, bool]] = dataclasses.field(default_factory=lambda: NO_BIASES)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_keys: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    expert_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def stated(model: ModelConfig, key: str) -> str:
    return f'model.{key}={getattr(model, key)}'


def plain_width(model: ModelConfig) -> str:
    return stated(model, 'head_dim') if model.head_dim * model.num_heads != model.dim else ''


def _plain_heads(model: ModelConfig) -> str:
    return stated(model, 'num_kv_heads') if model.num_kv_heads != model.num_heads else plain_width(model)


def divided_width(model: ModelConfig) -> str:
    return stated(model, 'num_heads') if model.dim % model.num_heads else ''


def full_context(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if set(layer_kinds(model)) != {'L'} else ''


def one_window(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if set(layer_kinds(model)) not in ({'L'}, {'S'}) else ''


def rotated_layers(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if 'N' in layer_kinds(model) else ''


def _scaled_or_plain_scores(model: ModelConfig) -> str:
    return '' if model.attention_multiplier in (0, 1) else stated(model, 'attention_multiplier')


def no_longrope(model: ModelConfig) -> str:
    return stated(model, 'rope_scaling') if model.rope_scaling == 'longrope' else ''


def same_rotated_dims(head_dim: int, fraction: float) -> bool:
    """Returns True if truncating the product (Transformers) and rounding it (maxlm) give the same number of dims."""
    return int(head_dim * fraction) == round(head_dim * fraction)


def equally_rotated(model: ModelConfig) -> str:
    same = same_rotated_dims(model.head_dim, model.partial_rotary_factor)
    return '' if same else stated(model, 'partial_rotary_factor')


def window_keys(model: ModelConfig) -> dict[str, Any]:
    return {'sliding_window': max(layer_windows(model)) or None}


def layer_types(model: ModelConfig) -> dict[str, Any]:
    types = ['sliding_attention' if sliding_window else 'full_attention' for sliding_window in layer_windows(model)]
    return {**window_keys(model), 'layer_types': types}


def qwen_layer_types(model: ModelConfig) -> dict[str, Any]:
    windows = layer_windows(model)
    full = next((i for i, sliding_window in enumerate(windows) if sliding_window), len(windows))
    return {**layer_types(model), 'use_sliding_window': any(windows), 'max_window_layers': full}


DECODER_KEYS = {
    'vocab_size': ('vocab_size', 32_000),
    'dim': ('hidden_size', 4096),
    'num_layers': ('num_hidden_layers', 32),
    'num_heads': ('num_attention_heads', 32),
    'num_kv_heads': ('num_key_value_heads', None),
    'head_dim': ('head_dim', None),
    'ffn_dim': ('intermediate_size', 11_008),
    'norm_epsilon': ('rms_norm_eps', 1e-6),
    'tie_embeddings': ('tie_word_embeddings', False),
    'max_positions': ('max_position_embeddings', 2048),
}
_PLAIN = {
    'block': '',
    'norm_use_scale': True,
    'norm_unit_offset': False,
    'norm_placement': 'pre',
    'qk_norm': False,
    'qk_norm_scope': 'head',
    'embedding_norm': False,
    'embedding_multiplier': 1.0,
    'residual_multiplier': 1.0,
    'residual_scale': False,
    'embedding_residual': False,
    'smear_channels': 0,
    'backout_layer': -1,
    'attention_multiplier': 0.0,
    'attention_softcap': 0.0,
    'logits_scaling': 1.0,
    'logit_softcap': 0.0,
    'relative_attention_multiplier': 1.0,
    'attention_scale_by_layer': False,
    'value_embedding_pattern': '',
    'rope_local_theta': 0.0,
    'kv_lora_rank': 0,
    'attention_sinks': False,
    'num_experts': 0,
}
LAYERNORM: dict[str, Any] = {'norm': 'layernorm', **_PLAIN}
LAYERNORM_BIASES = dict.fromkeys(('qkv', 'out', 'mlp', 'norm'), True)
RMSNORM: dict[str, Any] = {
    'position_embedding': 'rotary',
    'partial_rotary_factor': 1.0,
    'norm': 'rmsnorm',
    **_PLAIN,
    'parallel_residual': False,
}

GPT2 = Architecture(
    'gpt2',
    'GPT2LMHeadModel',
    'GPT-2',
    'gpt2',
    keys={
        'vocab_size': ('vocab_size', 50_257),
        'max_positions': ('n_positions', 1024),
        'dim': ('n_embd', 768),
        'num_layers': ('n_layer', 12),
        'num_heads': ('n_head', 12),
        'ffn_dim': ('n_inner', None),
        'norm_epsilon': ('layer_norm_epsilon', 1e-5),
        'tie_embeddings': ('tie_word_embeddings', True),
        'attention_scale_by_layer': ('scale_attn_by_inverse_layer_idx', False),
    },
    activation=('activation_function', 'gelu_new'),
    activations={'gelu_new': 'gelu_tanh', **PLAIN},
    fixed_settings={
        'position_embedding': 'learned',
        **without(LAYERNORM, 'attention_multiplier', 'attention_scale_by_layer'),
        'parallel_residual': False,
    },
    fixed_keys={'add_cross_attention': False},
    extra_keys=lambda model: {
        'scale_attn_weights': model.attention_multiplier == 0,
        'embd_pdrop': model.dropout,
        'resid_pdrop': model.dropout,
        'attn_pdrop': 0.0,
    },
    limits=(_plain_heads, divided_width, full_context, _scaled_or_plain_scores),
    biases=LAYERNORM_BIASES,
    aliases={
        'hidden_size': 'n_embd',
        'max_position_embeddings': 'n_positions',
        'num_attention_heads': 'n_head',
        'num_hidden_layers': 'n_layer',
    },
)
GPT_NEOX = Architecture(
    'gpt_neox',
    'GPTNeoXForCausalLM',
    'GPT-NeoX',
    'gpt_neox',
    keys={
        'vocab_size': ('vocab_size', 50_432),
        'dim': ('hidden_size', 6144),
        'num_layers': ('num_hidden_layers', 44),
        'num_heads': ('num_attention_heads', 64),
        'ffn_dim': ('intermediate_size', 24_576),
        'norm_epsilon': ('layer_norm_eps', 1e-5),
        'tie_embeddings': ('tie_word_embeddings', False),
        'parallel_residual': ('use_parallel_residual', True),
        'max_positions': ('max_position_embeddings', 2048),
    },
    activation=('hidden_act', 'gelu'),
    activations={'gelu': 'gelu', **PLAIN},
    fixed_settings={'position_embedding': 'rotary', **LAYERNORM},
    extra_keys=lambda model: {'hidden_dropout': model.dropout, 'attention_dropout': 0.0},
    limits=(_plain_heads, divided_width, full_context, equally_rotated, no_longrope),
    biases={**LAYERNORM_BIASES, 'qkv': ('attention_bias', True), 'out': ('attention_bias', True)},
)
LLAMA = Architecture(
    'llama',
    'LlamaForCausalLM',
    'Llama',
    'llama',
    keys=DECODER_KEYS,
    biases=SEPARATE_BIASES,
    # Heads may have any width in maxlm, but Transformers requires that num_heads divides hidden_size.
    limits=(divided_width, full_context, no_longrope),
)
MISTRAL = Architecture(
    'mistral',
    'MistralForCausalLM',
    'Mistral',
    'llama',
    keys={
        **DECODER_KEYS,
        'num_kv_heads': ('num_key_value_heads', 8),
        'ffn_dim': ('intermediate_size', 14_336),
        'max_positions': ('max_position_embeddings', 4096 * 32),
    },
    extra_keys=window_keys,
    limits=(one_window, no_longrope),
    sliding_window=4096,
)
QWEN3 = Architecture(
    'qwen3',
    'Qwen3ForCausalLM',
    'Qwen3',
    'qwen3',
    keys={
        **DECODER_KEYS,
        'vocab_size': ('vocab_size', 151_936),
        'num_kv_heads': ('num_key_value_heads', 32),
        'head_dim': ('head_dim', 128),
        'ffn_dim': ('intermediate_size', 22_016),
        'max_positions': ('max_position_embeddings', 32_768),
    },
    fixed_settings={**RMSNORM, 'qk_norm': True},
    extra_keys=qwen_layer_types,
    limits=(rotated_layers, no_longrope),
    biases=ATTENTION_BIASES,
)
# Transformers normalizes queries and keys after the rotation. The rotation preserves their norm, so the order does not
# matter. It rotates in the opposite direction, which the layout of the tensors compensates.
NANOCHAT = Architecture(
    'nanochat',
    'NanoChatForCausalLM',
    'nanochat',
    'nanochat',
    keys={
        **DECODER_KEYS,
        'vocab_size': ('vocab_size', 50_304),
        'dim': ('hidden_size', 768),
        'num_layers': ('num_hidden_layers', 12),
        'num_heads': ('num_attention_heads', 6),
        'ffn_dim': ('intermediate_size', 8192),
        'logit_softcap': ('final_logit_softcapping', 15.0),
    },
    activation=('hidden_act', 'relu2'),
    activations={'relu2': 'relu2', **PLAIN},
    fixed_settings={
        **without(RMSNORM, 'logit_softcap'),
        'norm_use_scale': False,
        'qk_norm': True,
        'embedding_norm': True,
    },
    fixed_keys={'attention_bias': False},
    limits=(full_context, no_longrope),
)
