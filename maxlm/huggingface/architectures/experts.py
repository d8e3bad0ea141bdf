"""Architectures with experts or latent attention.

Names and defaults: `configuration_*.py` of Transformers 5.
"""

from __future__ import annotations

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.architectures.architecture import (
    DECODER_KEYS,
    RMSNORM,
    SWIGLU,
    Architecture,
    full_context,
    no_longrope,
    stated,
)


def _latent_attention(model: ModelConfig) -> str:
    return '' if model.kv_lora_rank else stated(model, 'kv_lora_rank')


# DeepSeek-AI 2024, "DeepSeek-V3 Technical Report". Only models without experts are supported, in which all layers are
# among the first, dense layers.
DEEPSEEK_V3 = Architecture(
    'deepseek_v3',
    'DeepseekV3ForCausalLM',
    'DeepSeek-V3',
    'llama',
    keys={
        **{key: names for key, names in DECODER_KEYS.items() if key not in ('num_kv_heads', 'head_dim')},
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
    activations=SWIGLU,
    fixed_settings={**{key: value for key, value in RMSNORM.items() if key != 'kv_lora_rank'}, 'use_bias': False},
    fixed_keys={'attention_bias': False, 'rope_interleave': True},
    extra_keys=lambda model: {
        'num_key_value_heads': model.num_heads,
        'q_lora_rank': model.q_lora_rank or None,
        'first_k_dense_replace': model.num_layers,
    },
    limits=(_latent_attention, full_context, no_longrope),
)
