"""Architectures with experts, and DeepSeek-V3 without them.

Names and defaults: `configuration_*.py` of Transformers 5.
"""

from __future__ import annotations

from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.huggingface.architectures.architecture import (
    ATTENTION_BIASES,
    DECODER_KEYS,
    RMSNORM,
    Architecture,
    divided_width,
    full_context,
    layer_types,
    no_longrope,
    one_window,
    rotated_layers,
    stated,
    window_keys,
    without,
)


def _experts(model: ModelConfig) -> str:
    return '' if model.num_experts else stated(model, 'num_experts')


def _latent_attention(model: ModelConfig) -> str:
    return '' if model.kv_lora_rank else stated(model, 'kv_lora_rank')


def _shared_experts(model: ModelConfig) -> str:
    return stated(model, 'num_shared_experts') if model.num_experts and not model.num_shared_experts else ''


def _deepseek_v2_keys(model: ModelConfig) -> dict[str, Any]:
    is_limited = model.num_expert_groups > 1
    return {
        'num_key_value_heads': model.num_heads,
        'q_lora_rank': model.q_lora_rank or None,
        'topk_method': 'group_limited_greedy' if is_limited else 'greedy',
    }


def _deepseek_v3_keys(model: ModelConfig) -> dict[str, Any]:
    keys = {
        'num_key_value_heads': model.num_heads,
        'q_lora_rank': model.q_lora_rank or None,
        'num_nextn_predict_layers': model.mtp_depth,
    }
    # The layers of the modules are dense too.
    return keys if model.num_experts else {**keys, 'first_k_dense_replace': model.num_layers + model.mtp_depth}


_EXPERT_SETTINGS = without(RMSNORM, 'num_experts')
# Settings of a router that normalizes the probabilities of the selected experts, without groups and biases.
_ROUTER = {
    'num_shared_experts': 0,
    'num_dense_layers': 0,
    'router_score': 'softmax',
    'router_normalize': True,
    'routed_scaling_factor': 1.0,
    'router_use_bias': False,
    'router_balance_bias': False,
    'num_expert_groups': 1,
    'num_groups_per_token': 1,
}
_DEEPSEEK_KEYS = {
    **without(DECODER_KEYS, 'num_kv_heads', 'head_dim'),
    'kv_lora_rank': ('kv_lora_rank', 512),
    'q_lora_rank': ('q_lora_rank', 1536),
    'qk_nope_head_dim': ('qk_nope_head_dim', 128),
    'qk_rope_head_dim': ('qk_rope_head_dim', 64),
    'v_head_dim': ('v_head_dim', 128),
}
_DEEPSEEK_SETTINGS = without(_EXPERT_SETTINGS, 'kv_lora_rank')

# Jiang et al. 2024, "Mixtral of Experts".
MIXTRAL = Architecture(
    'mixtral',
    'MixtralForCausalLM',
    'Mixtral',
    'mixtral',
    keys={
        **without(DECODER_KEYS, 'ffn_dim'),
        'num_kv_heads': ('num_key_value_heads', 8),
        'norm_epsilon': ('rms_norm_eps', 1e-5),
        'max_positions': ('max_position_embeddings', 131_072),
    },
    expert_keys={
        'num_experts': ('num_local_experts', 8),
        'num_experts_per_token': ('num_experts_per_tok', 2),
        'expert_ffn_dim': ('intermediate_size', 14_336),
    },
    fixed_settings=_EXPERT_SETTINGS,
    expert_settings=_ROUTER,
    extra_keys=window_keys,
    limits=(_experts, one_window, no_longrope),
    sliding_window=0,
    aliases={'num_experts': 'num_local_experts'},
)
# Yang et al. 2025, "Qwen3 Technical Report".
QWEN3_MOE = Architecture(
    'qwen3_moe',
    'Qwen3MoeForCausalLM',
    'Qwen3-MoE',
    'qwen3_moe',
    keys={
        **DECODER_KEYS,
        'vocab_size': ('vocab_size', 151_936),
        'dim': ('hidden_size', 2048),
        'num_layers': ('num_hidden_layers', 24),
        'num_kv_heads': ('num_key_value_heads', 4),
        'ffn_dim': ('intermediate_size', 6144),
        'max_positions': ('max_position_embeddings', 32_768),
    },
    expert_keys={
        'num_experts': ('num_experts', 128),
        'num_experts_per_token': ('num_experts_per_tok', 8),
        'expert_ffn_dim': ('moe_intermediate_size', 768),
        'router_normalize': ('norm_topk_prob', False),
    },
    fixed_settings={**_EXPERT_SETTINGS, 'qk_norm': True},
    expert_settings=without(_ROUTER, 'router_normalize'),
    biases=ATTENTION_BIASES,
    fixed_keys={
        'use_sliding_window': False,
        'decoder_sparse_step': 1,
        'mlp_only_layers': [],
    },
    limits=(_experts, full_context, no_longrope),
    # The name in Transformers 5.
    aliases={'num_local_experts': 'num_experts'},
)
# DeepSeek-AI 2024, "DeepSeek-V2". Transformers does not normalize the scores of the selected experts.
DEEPSEEK_V2 = Architecture(
    'deepseek_v2',
    'DeepseekV2ForCausalLM',
    'DeepSeek-V2',
    'deepseek_v2',
    keys={**_DEEPSEEK_KEYS, 'vocab_size': ('vocab_size', 102_400)},
    expert_keys={
        'num_experts': ('n_routed_experts', 64),
        'num_experts_per_token': ('num_experts_per_tok', None),
        'expert_ffn_dim': ('moe_intermediate_size', 1407),
        'num_shared_experts': ('n_shared_experts', 2),
        'num_dense_layers': ('first_k_dense_replace', 0),
        'routed_scaling_factor': ('routed_scaling_factor', 1.0),
        'num_expert_groups': ('n_group', 1),
        'num_groups_per_token': ('topk_group', 1),
    },
    fixed_settings=_DEEPSEEK_SETTINGS,
    expert_settings={
        'router_score': 'softmax',
        'router_normalize': False,
        'router_use_bias': False,
        'router_balance_bias': False,
        'expert_group_score': 'max',
    },
    fixed_keys={'attention_bias': False, 'mlp_bias': False, 'norm_topk_prob': False},
    extra_keys=_deepseek_v2_keys,
    aliases={'num_experts': 'n_routed_experts'},
    limits=(_experts, _latent_attention, _shared_experts, divided_width, full_context, no_longrope),
)
# DeepSeek-AI 2024, "DeepSeek-V3 Technical Report". A model whose layers are all dense has no experts.
DEEPSEEK_V3 = Architecture(
    'deepseek_v3',
    'DeepseekV3ForCausalLM',
    'DeepSeek-V3',
    'deepseek_v3',
    keys={
        **_DEEPSEEK_KEYS,
        'vocab_size': ('vocab_size', 129_280),
        'dim': ('hidden_size', 7168),
        'num_layers': ('num_hidden_layers', 61),
        'num_heads': ('num_attention_heads', 128),
        'ffn_dim': ('intermediate_size', 18_432),
        'max_positions': ('max_position_embeddings', 4096),
    },
    expert_keys={
        'num_experts': ('n_routed_experts', 256),
        'num_experts_per_token': ('num_experts_per_tok', 8),
        'expert_ffn_dim': ('moe_intermediate_size', 2048),
        'num_shared_experts': ('n_shared_experts', 1),
        'num_dense_layers': ('first_k_dense_replace', 3),
        'router_normalize': ('norm_topk_prob', True),
        'routed_scaling_factor': ('routed_scaling_factor', 2.5),
        'num_expert_groups': ('n_group', 8),
        'num_groups_per_token': ('topk_group', 4),
    },
    fixed_settings=_DEEPSEEK_SETTINGS,
    expert_settings={
        'router_score': 'sigmoid',
        'router_use_bias': False,
        'router_balance_bias': True,
        'expert_group_score': 'top2',
    },
    fixed_keys={'attention_bias': False, 'rope_interleave': True},
    extra_keys=_deepseek_v3_keys,
    aliases={'num_local_experts': 'n_routed_experts'},
    limits=(_latent_attention, _shared_experts, full_context, no_longrope),
)
# OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card".
GPT_OSS = Architecture(
    'gpt_oss',
    'GptOssForCausalLM',
    'gpt-oss',
    'gpt_oss',
    keys={
        **without(DECODER_KEYS, 'ffn_dim'),
        'vocab_size': ('vocab_size', 201_088),
        'dim': ('hidden_size', 2880),
        'num_layers': ('num_hidden_layers', 36),
        'num_heads': ('num_attention_heads', 64),
        'num_kv_heads': ('num_key_value_heads', 8),
        'head_dim': ('head_dim', 64),
        'norm_epsilon': ('rms_norm_eps', 1e-5),
        'max_positions': ('max_position_embeddings', 131_072),
    },
    expert_keys={
        'num_experts': ('num_local_experts', 128),
        'num_experts_per_token': ('num_experts_per_tok', 4),
        'expert_ffn_dim': ('intermediate_size', 2880),
    },
    activation=('hidden_act', 'silu'),
    activations={'silu': 'swiglu_oai'},
    fixed_settings={**without(_EXPERT_SETTINGS, 'attention_sinks'), 'attention_sinks': True},
    expert_settings={**_ROUTER, 'router_use_bias': True},
    biases={'qkv': ('attention_bias', True), 'out': ('attention_bias', True), 'mlp': True},
    aliases={'num_experts': 'num_local_experts'},
    fixed_keys={'swiglu_alpha': 1.702, 'swiglu_limit': 7.0},
    extra_keys=layer_types,
    limits=(_experts, rotated_layers, no_longrope),
    sliding_window=128,
    pattern='SL',
)
