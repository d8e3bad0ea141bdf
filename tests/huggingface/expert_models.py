"""Overrides of small models with experts by the architecture that expresses them."""

from typing import Any

from tests.small import LATENT, model_keys

_EXPERTS = model_keys(num_experts=4, num_experts_per_token=2, expert_ffn_dim=12)
_DEEPSEEK = {
    **LATENT,
    **_EXPERTS,
    **model_keys(
        num_layers=3, num_dense_layers=1, num_shared_experts=2, routed_scaling_factor=1.5, num_expert_groups=2
    ),
}
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    'mixtral': {'model__family': 'mixtral', **_EXPERTS, 'model__ffn_dim': 12},
    'qwen3_moe': {'model__family': 'qwen3_moe', **_EXPERTS},
    'deepseek_v2': {**_DEEPSEEK, 'model__family': 'deepseek_v2', 'model__router_normalize': False},
    'deepseek_v3': {
        **_DEEPSEEK,
        **model_keys(
            family='deepseek_v3',
            q_lora_rank=20,
            router_score='sigmoid',
            router_balance_bias=True,
            expert_group_score='top2',
        ),
    },
    'gpt_oss': {
        **model_keys(family='gpt_oss'),
        **_EXPERTS,
        **model_keys(ffn_dim=12, router_use_bias=True, sliding_window=6),
    },
}
