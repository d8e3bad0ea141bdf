"""Overrides of small models with experts by the architecture that expresses them."""

from typing import Any

from tests.small import LATENT

_EXPERTS = {'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 12}
_DEEPSEEK = {
    **LATENT,
    **_EXPERTS,
    'model__num_layers': 3,
    'model__num_dense_layers': 1,
    'model__num_shared_experts': 2,
    'model__routed_scaling_factor': 1.5,
    'model__num_expert_groups': 2,
}
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    'mixtral': {'model__family': 'mixtral', **_EXPERTS, 'model__ffn_dim': 12},
    'qwen3_moe': {'model__family': 'qwen3_moe', **_EXPERTS},
    'deepseek_v2': {**_DEEPSEEK, 'model__family': 'deepseek_v2', 'model__router_normalize': False},
    'deepseek_v3': {
        **_DEEPSEEK,
        'model__family': 'deepseek_v3',
        'model__q_lora_rank': 20,
        'model__router_score': 'sigmoid',
        'model__router_balance_bias': True,
        'model__expert_group_score': 'top2',
    },
    'gpt_oss': {
        'model__family': 'gpt_oss',
        **_EXPERTS,
        'model__ffn_dim': 12,
        'model__router_use_bias': True,
        'model__sliding_window': 6,
    },
}
