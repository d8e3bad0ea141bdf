"""Validates the keys of experts."""

from __future__ import annotations

import dataclasses

from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError

# Keys that only models with experts have.
_EXPERT_KEYS = (
    'num_experts_per_token',
    'expert_ffn_dim',
    'num_shared_experts',
    'num_dense_layers',
    'router_use_bias',
    'router_balance_bias',
    'num_expert_groups',
    'num_groups_per_token',
    'expert_capacity_factor',
)


def check_experts(config: Config) -> None:
    """Checks the keys of experts in combination.

    Raises:
        InputError: values are inconsistent, or a setting does not support experts.
    """
    model, mesh = config.model, config.mesh
    if not model.num_experts:
        defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
        for key in _EXPERT_KEYS:
            if getattr(model, key) != defaults[key]:
                raise InputError(
                    f'model.{key}={getattr(model, key)} has no effect with model.num_experts=0; set '
                    f'model.num_experts, or set model.{key}={defaults[key]}'
                )
        if mesh.expert > 1:
            raise InputError(
                f'mesh.expert={mesh.expert} requires a model with experts, but model.num_experts=0; set mesh.expert=1'
            )
        return
    E, k, G = model.num_experts, model.num_experts_per_token, model.num_expert_groups
    if not 1 <= k <= E:
        raise InputError(
            f'model.num_experts_per_token={k}: must be at least 1 and at most model.num_experts={E}; typical: 2 to 8'
        )
    if model.num_dense_layers >= model.num_layers:
        raise InputError(
            f'model.num_dense_layers={model.num_dense_layers} leaves none of model.num_layers={model.num_layers} with '
            f'experts; set it to at most {model.num_layers - 1}, or set model.num_experts=0'
        )
    if E % G:
        raise InputError(f'model.num_expert_groups={G} does not divide model.num_experts={E}; use a divisor of {E}')
    if model.num_groups_per_token > G or k > E // G * model.num_groups_per_token:
        raise InputError(
            f'model.num_groups_per_token={model.num_groups_per_token}: {G} groups of {E // G} experts must contain '
            f'model.num_experts_per_token={k} experts; set it between {-(-k * G // E)} and {G}'
        )
    if model.expert_group_score == 'top2' and E // G < 2:
        raise InputError(
            f'model.expert_group_score=top2 requires groups of 2 experts or more; model.num_expert_groups={G} gives '
            f'groups of {E // G}; lower it'
        )
    if model.matmul_precision == 'fp8':
        raise InputError(
            f'model.matmul_precision=fp8 does not support model.num_experts={E}; set model.matmul_precision=default'
        )
    if model.router_balance_bias and mesh.host_offload == 'all':
        raise InputError(
            'model.router_balance_bias=True does not support mesh.host_offload=all; set mesh.host_offload=optimizer'
        )
    if model.expert_capacity_factor and mesh.context > 1:
        raise InputError(
            f'model.expert_capacity_factor={model.expert_capacity_factor:g} is per sequence, so it does not support '
            f'mesh.context={mesh.context}; set model.expert_capacity_factor=0 or mesh.context=1'
        )
