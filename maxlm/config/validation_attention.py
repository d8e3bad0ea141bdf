"""Validates the config keys of multi-head latent attention."""

from __future__ import annotations

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError

_SIZES = ('qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim')


def check_latent_attention(model: ModelConfig) -> None:
    """Checks the sizes of latent attention, and that no other key contradicts it.

    Raises:
        InputError: a size is missing, or a key requires another kind of attention.
    """
    if not model.kv_lora_rank:
        for key in ('q_lora_rank', *_SIZES, 'rope_mscale_all_dim'):
            if getattr(model, key):
                raise InputError(
                    f'model.{key}={getattr(model, key)} requires latent attention; set model.kv_lora_rank, or set '
                    f'model.{key}=0'
                )
        return
    latent = f'model.kv_lora_rank={model.kv_lora_rank}'
    for key in _SIZES:
        if not getattr(model, key):
            raise InputError(f'model.{key}=0 with {latent}: latent attention requires this size; set it above 0')
    head_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.v_head_dim > head_dim:
        raise InputError(
            f'model.v_head_dim={model.v_head_dim} is above model.qk_nope_head_dim + model.qk_rope_head_dim={head_dim}; '
            f'set it to {head_dim} or less'
        )
    required = {
        'head_dim': (head_dim, model.head_dim or head_dim),
        'num_kv_heads': (model.num_heads, model.num_kv_heads or model.num_heads),
        'position_embedding': ('rotary', model.position_embedding),
        'partial_rotary_factor': (1.0, model.partial_rotary_factor),
        'use_bias': (False, bool(model.use_bias)),
        'qk_norm': (False, bool(model.qk_norm)),
        'attention_sinks': (False, bool(model.attention_sinks)),
    }
    for key, (wanted, found) in required.items():
        if found != wanted:
            raise InputError(f'model.{key}={found} with {latent}: latent attention requires model.{key}={wanted}')
    if model.rope_mscale_all_dim and model.rope_scaling != 'yarn':
        raise InputError(
            f'model.rope_mscale_all_dim={model.rope_mscale_all_dim} has no effect with '
            f'model.rope_scaling={model.rope_scaling}; set it to 0, or set model.rope_scaling=yarn'
        )
