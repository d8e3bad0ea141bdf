"""Dense architectures with the names of Llama: Qwen2.5, SmolLM3, OLMo, Granite, Phi, Gemma and StarCoder2.

Names and defaults: `configuration_*.py` of Transformers 5.
"""

from __future__ import annotations

from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.architectures.architecture import (
    ATTENTION_BIASES,
    DECODER_KEYS,
    LAYERNORM,
    LAYERNORM_BIASES,
    NO_BIASES,
    PLAIN,
    QWEN3,
    RMSNORM,
    SEPARATE_BIASES,
    Architecture,
    divided_width,
    equally_rotated,
    full_context,
    layer_types,
    no_longrope,
    one_window,
    plain_width,
    qwen_layer_types,
    rotated_layers,
    stated,
    window_keys,
    without,
)
from maxlm.model.layers.masks import layer_kinds, layer_windows


def _no_windows(model: ModelConfig) -> str:
    return stated(model, 'attention_pattern') if any(layer_windows(model)) else ''


def _longrope_only(model: ModelConfig) -> str:
    return '' if model.rope_scaling in ('none', 'longrope') else stated(model, 'rope_scaling')


def _embedding_by_width(model: ModelConfig) -> str:
    return '' if model.embedding_multiplier == model.dim**0.5 else stated(model, 'embedding_multiplier')


def _integer_scalar(model: ModelConfig) -> str:
    """Checks that the scores are divided by the square root of an integer, `query_pre_attn_scalar`."""
    multiplier = model.attention_multiplier
    exact = not multiplier or round(multiplier**-2) ** -0.5 == multiplier
    return '' if exact else stated(model, 'attention_multiplier')


def _no_rope_layers(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_kinds(model)
    rotated = [int(kind != 'N') for kind in kinds]
    return {
        'no_rope_layers': rotated,
        'layer_types': ['full_attention'] * len(kinds),
        'use_sliding_window': False,
        'pad_token_id': None,
    }


# Transformers computes the same norm of queries and keys over all heads.
_OLMO_SETTINGS = {
    **RMSNORM,
    'norm_placement': 'post',
    'qk_norm': True,
    'qk_norm_scope': 'projection',
}
_OLMO_KEYS = {**DECODER_KEYS, 'vocab_size': ('vocab_size', 50_304), 'norm_epsilon': ('rms_norm_eps', 1e-5)}
_GEMMA_KEYS = {
    **DECODER_KEYS,
    'dim': ('hidden_size', 2304),
    'num_layers': ('num_hidden_layers', 26),
    'num_heads': ('num_attention_heads', 8),
    'num_kv_heads': ('num_key_value_heads', 4),
    'head_dim': ('head_dim', 256),
    'ffn_dim': ('intermediate_size', 9216),
    'tie_embeddings': ('tie_word_embeddings', True),
    'attention_multiplier': ('query_pre_attn_scalar', 256),
    'logit_softcap': ('final_logit_softcapping', 0),
}
_GEMMA_SETTINGS = {
    **without(RMSNORM, 'attention_multiplier', 'attention_softcap', 'logit_softcap', 'embedding_multiplier'),
    'norm_unit_offset': True,
    'norm_placement': 'both',
}

QWEN2 = Architecture(
    'qwen2',
    'Qwen2ForCausalLM',
    'Qwen2.5',
    'qwen2',
    keys={**QWEN3.keys, 'head_dim': ('head_dim', None)},
    extra_keys=qwen_layer_types,
    limits=(rotated_layers, no_longrope),
    biases={**NO_BIASES, 'qkv': True},
)
SMOLLM3 = Architecture(
    'smollm3',
    'SmolLM3ForCausalLM',
    'SmolLM3',
    'smollm3',
    keys={
        **DECODER_KEYS,
        'vocab_size': ('vocab_size', 128_256),
        'dim': ('hidden_size', 2048),
        'num_layers': ('num_hidden_layers', 36),
        'num_heads': ('num_attention_heads', 16),
        'num_kv_heads': ('num_key_value_heads', 4),
        'tie_embeddings': ('tie_word_embeddings', True),
        'max_positions': ('max_position_embeddings', 32_768),
    },
    fixed_keys={'use_sliding_window': False},
    extra_keys=_no_rope_layers,
    limits=(_no_windows, no_longrope),
    biases=SEPARATE_BIASES,
)
OLMO2 = Architecture(
    'olmo2',
    'Olmo2ForCausalLM',
    'OLMo 2',
    'olmo2',
    keys=_OLMO_KEYS,
    fixed_settings=_OLMO_SETTINGS,
    limits=(divided_width, full_context, no_longrope),
    biases=ATTENTION_BIASES,
)
OLMO3 = Architecture(
    'olmo3',
    'Olmo3ForCausalLM',
    'OLMo 3',
    'olmo3',
    keys=_OLMO_KEYS,
    fixed_settings=without(_OLMO_SETTINGS, 'rope_local_theta'),
    biases=ATTENTION_BIASES,
    extra_keys=layer_types,
    limits=(divided_width, rotated_layers, no_longrope),
    sliding_window=4096,
    pattern='SSSL',
)
GRANITE = Architecture(
    'granite',
    'GraniteForCausalLM',
    'Granite',
    'granite',
    keys={
        **DECODER_KEYS,
        'embedding_multiplier': ('embedding_multiplier', 1.0),
        'residual_multiplier': ('residual_multiplier', 1.0),
        'attention_multiplier': ('attention_multiplier', 1.0),
        'logits_scaling': ('logits_scaling', 1.0),
    },
    fixed_settings=without(
        RMSNORM, 'embedding_multiplier', 'residual_multiplier', 'attention_multiplier', 'logits_scaling'
    ),
    limits=(full_context, no_longrope),
    biases=SEPARATE_BIASES,
)
PHI3 = Architecture(
    'phi3',
    'Phi3ForCausalLM',
    'Phi-3',
    'phi3',
    keys={
        **without(DECODER_KEYS, 'head_dim'),
        'vocab_size': ('vocab_size', 32_064),
        'dim': ('hidden_size', 3072),
        'ffn_dim': ('intermediate_size', 8192),
        'norm_epsilon': ('rms_norm_eps', 1e-5),
        'max_positions': ('max_position_embeddings', 4096),
    },
    fixed_settings=without(RMSNORM, 'partial_rotary_factor'),
    extra_keys=lambda model: {
        **window_keys(model),
        'resid_pdrop': model.dropout,
        'embd_pdrop': model.dropout,
        'pad_token_id': None,
    },
    limits=(plain_width, one_window, equally_rotated, _longrope_only),
    sliding_window=0,
)
GEMMA2 = Architecture(
    'gemma2',
    'Gemma2ForCausalLM',
    'Gemma 2',
    'gemma2',
    keys={
        **_GEMMA_KEYS,
        'vocab_size': ('vocab_size', 256_000),
        'max_positions': ('max_position_embeddings', 8192),
        'attention_softcap': ('attn_logit_softcapping', 50.0),
        'logit_softcap': ('final_logit_softcapping', 30.0),
    },
    activation=('hidden_activation', 'gelu_pytorch_tanh'),
    fixed_settings=_GEMMA_SETTINGS,
    fixed_keys={'use_bidirectional_attention': False},
    biases=ATTENTION_BIASES,
    extra_keys=layer_types,
    limits=(divided_width, rotated_layers, no_longrope, _embedding_by_width, _integer_scalar),
    sliding_window=4096,
    pattern='SL',
)
GEMMA3 = Architecture(
    'gemma3_text',
    'Gemma3ForCausalLM',
    'Gemma 3',
    'gemma3',
    keys={
        **_GEMMA_KEYS,
        'vocab_size': ('vocab_size', 262_208),
        'max_positions': ('max_position_embeddings', 131_072),
    },
    activation=('hidden_activation', 'gelu_pytorch_tanh'),
    fixed_settings={**without(_GEMMA_SETTINGS, 'rope_local_theta'), 'qk_norm': True, 'attention_softcap': 0.0},
    # Transformers ignores `attn_logit_softcapping` in Gemma 3.
    fixed_keys={'use_bidirectional_attention': False, 'attn_logit_softcapping': None},
    biases=ATTENTION_BIASES,
    extra_keys=layer_types,
    limits=(divided_width, rotated_layers, no_longrope, _embedding_by_width, _integer_scalar),
    sliding_window=4096,
    pattern='SSSSSL',
)
STARCODER2 = Architecture(
    'starcoder2',
    'Starcoder2ForCausalLM',
    'StarCoder2',
    'starcoder2',
    keys={
        **without(DECODER_KEYS, 'head_dim'),
        'vocab_size': ('vocab_size', 49_152),
        'dim': ('hidden_size', 3072),
        'num_layers': ('num_hidden_layers', 30),
        'num_heads': ('num_attention_heads', 24),
        'num_kv_heads': ('num_key_value_heads', 2),
        'ffn_dim': ('intermediate_size', 12_288),
        'norm_epsilon': ('norm_epsilon', 1e-5),
        'tie_embeddings': ('tie_word_embeddings', True),
        'max_positions': ('max_position_embeddings', 4096),
    },
    activation=('hidden_act', 'gelu_pytorch_tanh'),
    activations=PLAIN,
    fixed_settings={
        'position_embedding': 'rotary',
        'partial_rotary_factor': 1.0,
        **LAYERNORM,
        'parallel_residual': False,
    },
    biases=dict.fromkeys(LAYERNORM_BIASES, ('use_bias', True)) | {'norm': True},
    extra_keys=lambda model: {
        **window_keys(model),
        'embedding_dropout': model.dropout,
        'residual_dropout': model.dropout,
        'attention_dropout': 0.0,
    },
    limits=(plain_width, one_window, no_longrope),
    sliding_window=0,
)
