"""Table of supported Transformers architectures: their keys in config.json and the models that they can express.

Names and defaults: `configuration_*.py` of Transformers 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.masks import layer_windows

_GELUS = {
    'gelu_new': 'gelu_tanh',
    'gelu_pytorch_tanh': 'gelu_tanh',
    'gelu_fast': 'gelu_tanh',
    'gelu_accurate': 'gelu_tanh',
    'gelu_python_tanh': 'gelu_tanh',
    'gelu': 'gelu',
    'gelu_python': 'gelu',
    'relu2': 'relu2',
}
_SWIGLU = {'silu': 'swiglu', 'swish': 'swiglu'}


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
        fixed_keys: keys of config.json for which maxlm supports only one value, which is also their default.
        extra_keys: function from a model to further keys of config.json.
        limits: functions that return an unsupported setting of a model as `model.key=value`, or ''.
    """

    model_type: str
    class_name: str
    title: str
    family: str
    keys: Mapping[str, tuple[str, Any]]
    activation: tuple[str, str]
    activations: Mapping[str, str]
    fixed_settings: Mapping[str, Any]
    fixed_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra_keys: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    limits: tuple[Callable[[ModelConfig], str], ...] = ()


def stated(model: ModelConfig, key: str) -> str:
    return f'model.{key}={getattr(model, key)}'


def _plain_heads(model: ModelConfig) -> str:
    if model.num_kv_heads != model.num_heads:
        return stated(model, 'num_kv_heads')
    return stated(model, 'head_dim') if model.head_dim * model.num_heads != model.dim else ''


def _divided_width(model: ModelConfig) -> str:
    return stated(model, 'num_heads') if model.dim % model.num_heads else ''


def _latent_attention(model: ModelConfig) -> str:
    return '' if model.kv_lora_rank else stated(model, 'kv_lora_rank')


def _full_context(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if any(layer_windows(model)) else ''


def _one_window(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if len(set(layer_windows(model))) > 1 else ''


def same_rotated_dims(head_dim: int, fraction: float) -> bool:
    """Returns True if truncating the product (Transformers) and rounding it (maxlm) give the same number of dims."""
    return int(head_dim * fraction) == round(head_dim * fraction)


def _same_rotated_dims(model: ModelConfig) -> str:
    return (
        '' if same_rotated_dims(model.head_dim, model.partial_rotary_factor) else stated(model, 'partial_rotary_factor')
    )


def _window_keys(model: ModelConfig) -> dict[str, Any]:
    return {'sliding_window': max(layer_windows(model)) or None}


def _layer_types(model: ModelConfig) -> dict[str, Any]:
    windows = layer_windows(model)
    types = ['sliding_attention' if window else 'full_attention' for window in windows]
    full = next((i for i, window in enumerate(windows) if window), len(windows))
    used = {'use_sliding_window': any(windows), 'max_window_layers': full, 'layer_types': types}
    return {**_window_keys(model), **used}


_DECODER_KEYS = {
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
    'qk_norm': False,
    'embedding_norm': False,
    'logit_softcap': 0.0,
    'kv_lora_rank': 0,
    'attention_sinks': False,
}
_LAYERNORM = {'norm': 'layernorm', **_PLAIN, 'use_bias': True}
_RMSNORM = {
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
    },
    activation=('activation_function', 'gelu_new'),
    activations=_GELUS,
    fixed_settings={'position_embedding': 'learned', **_LAYERNORM, 'parallel_residual': False},
    fixed_keys={'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, 'add_cross_attention': False},
    extra_keys=lambda model: {'embd_pdrop': model.dropout, 'resid_pdrop': model.dropout, 'attn_pdrop': 0.0},
    limits=(_plain_heads, _divided_width, _full_context),
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
    activations=_GELUS,
    fixed_settings={'position_embedding': 'rotary', **_LAYERNORM},
    fixed_keys={'attention_bias': True},
    extra_keys=lambda model: {'hidden_dropout': model.dropout, 'attention_dropout': 0.0},
    limits=(_plain_heads, _divided_width, _full_context, _same_rotated_dims),
)
LLAMA = Architecture(
    'llama',
    'LlamaForCausalLM',
    'Llama',
    'llama',
    keys={**_DECODER_KEYS, 'use_bias': ('attention_bias', False)},
    activation=('hidden_act', 'silu'),
    activations=_SWIGLU,
    fixed_settings=_RMSNORM,
    extra_keys=lambda model: {'mlp_bias': model.use_bias},
    # Heads may have any width in maxlm, but Transformers requires that num_heads divides hidden_size.
    limits=(_divided_width, _full_context),
)
MISTRAL = Architecture(
    'mistral',
    'MistralForCausalLM',
    'Mistral',
    'llama',
    keys={
        **_DECODER_KEYS,
        'num_kv_heads': ('num_key_value_heads', 8),
        'ffn_dim': ('intermediate_size', 14_336),
        'max_positions': ('max_position_embeddings', 4096 * 32),
    },
    activation=('hidden_act', 'silu'),
    activations=_SWIGLU,
    fixed_settings={**_RMSNORM, 'use_bias': False},
    extra_keys=_window_keys,
    limits=(_one_window,),
)
QWEN3 = Architecture(
    'qwen3',
    'Qwen3ForCausalLM',
    'Qwen3',
    'qwen3',
    keys={
        **_DECODER_KEYS,
        'vocab_size': ('vocab_size', 151_936),
        'num_kv_heads': ('num_key_value_heads', 32),
        'head_dim': ('head_dim', 128),
        'ffn_dim': ('intermediate_size', 22_016),
        'max_positions': ('max_position_embeddings', 32_768),
    },
    activation=('hidden_act', 'silu'),
    activations=_SWIGLU,
    fixed_settings={**_RMSNORM, 'qk_norm': True, 'use_bias': False},
    fixed_keys={'attention_bias': False},
    extra_keys=_layer_types,
)
# Transformers normalizes queries and keys after the rotation. The rotation preserves their norm, so the order does not
# matter. It rotates in the opposite direction, which the layout of the tensors compensates.
NANOCHAT = Architecture(
    'nanochat',
    'NanoChatForCausalLM',
    'nanochat',
    'nanochat',
    keys={
        **_DECODER_KEYS,
        'vocab_size': ('vocab_size', 50_304),
        'dim': ('hidden_size', 768),
        'num_layers': ('num_hidden_layers', 12),
        'num_heads': ('num_attention_heads', 6),
        'ffn_dim': ('intermediate_size', 8192),
        'logit_softcap': ('final_logit_softcapping', 15.0),
    },
    activation=('hidden_act', 'relu2'),
    activations={'relu2': 'relu2', **_GELUS},
    fixed_settings={
        **{key: value for key, value in _RMSNORM.items() if key != 'logit_softcap'},
        'norm_use_scale': False,
        'qk_norm': True,
        'embedding_norm': True,
        'use_bias': False,
    },
    fixed_keys={'attention_bias': False},
    limits=(_full_context,),
)
# DeepSeek-AI 2024, "DeepSeek-V3 Technical Report". Only models without experts are supported, in which all layers are
# among the first, dense layers.
DEEPSEEK_V3 = Architecture(
    'deepseek_v3',
    'DeepseekV3ForCausalLM',
    'DeepSeek-V3',
    'llama',
    keys={
        **{key: names for key, names in _DECODER_KEYS.items() if key not in ('num_kv_heads', 'head_dim')},
        'vocab_size': ('vocab_size', 129_280),
        'dim': ('hidden_size', 7168),
        'num_layers': ('num_hidden_layers', 61),
        'num_heads': ('num_attention_heads', 128),
        'ffn_dim': ('intermediate_size', 18_432),
        'max_positions': ('max_position_embeddings', 4096),
        'kv_lora_rank': ('kv_lora_rank', 512),
        'q_lora_rank': ('q_lora_rank', 1536),
        'qk_nope_head_dim': ('qk_nope_head_dim', 128),
        'qk_rope_head_dim': ('qk_rope_head_dim', 64),
        'v_head_dim': ('v_head_dim', 128),
    },
    activation=('hidden_act', 'silu'),
    activations=_SWIGLU,
    fixed_settings={**{key: value for key, value in _RMSNORM.items() if key != 'kv_lora_rank'}, 'use_bias': False},
    fixed_keys={'attention_bias': False, 'rope_interleave': True},
    extra_keys=lambda model: {
        'num_key_value_heads': model.num_heads,
        'q_lora_rank': model.q_lora_rank or None,
        'first_k_dense_replace': model.num_layers,
    },
    limits=(_latent_attention, _full_context),
)
ARCHITECTURES = {row.model_type: row for row in (GPT2, GPT_NEOX, LLAMA, MISTRAL, QWEN3, DEEPSEEK_V3, NANOCHAT)}
# Architectures that other programs also support. Only Transformers supports nanochat, so it must be requested.
DEFAULT_ARCHITECTURES = (GPT2, GPT_NEOX, LLAMA, MISTRAL, QWEN3, DEEPSEEK_V3)
