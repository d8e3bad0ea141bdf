"""Validates the keys of the model's architecture in combination, including those of experts."""

from __future__ import annotations

import dataclasses

from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.ranges import Range
from maxlm.errors import InputError

# Divisor of a rotary frequency.
FACTOR = Range(0, 1e5, above=True)
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
_SIZES = ('qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim')


def check_architecture(model: ModelConfig) -> None:
    """Raises InputError for contradicting settings of attention, positions, norms or the residual stream."""
    _check_latent_attention(model)
    _check_rotary(model)
    _check_attention_pattern(model)
    _check_value_embeddings(model)
    _check_norms(model)
    _check_stream(model)


def _check_latent_attention(model: ModelConfig) -> None:
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
        **{key: (False, bool(getattr(model, key))) for key in ('use_bias', 'qkv_bias', 'out_bias')},
        'attention_scale_by_layer': (False, model.attention_scale_by_layer),
        'qk_norm': (False, bool(model.qk_norm)),
        'attention_sinks': (False, bool(model.attention_sinks)),
        'attention_multiplier': (0.0, model.attention_multiplier),
        'relative_attention_multiplier': (1.0, model.relative_attention_multiplier),
        'value_embedding_pattern': ('', model.value_embedding_pattern),
        'attention_softcap': (0.0, model.attention_softcap),
    }
    for key, (expected, found) in required.items():
        if found != expected:
            wanted = "''" if expected == '' else expected
            raise InputError(f'model.{key}={found} with {latent}: latent attention requires model.{key}={wanted}')
    if 'N' in model.attention_pattern:
        raise InputError(
            f'model.attention_pattern={model.attention_pattern} with {latent}: latent attention requires rotary '
            'positions in all layers; use the letters L and S'
        )
    if model.rope_mscale_all_dim and model.rope_scaling != 'yarn':
        raise InputError(
            f'model.rope_mscale_all_dim={model.rope_mscale_all_dim} has no effect with '
            f'model.rope_scaling={model.rope_scaling}; set it to 0, or set model.rope_scaling=yarn'
        )


def _check_rotary(model: ModelConfig) -> None:
    for small, large in (('rope_low_freq_factor', 'rope_high_freq_factor'), ('rope_beta_slow', 'rope_beta_fast')):
        if getattr(model, small) >= getattr(model, large):
            raise InputError(
                f'model.{small}={getattr(model, small)} must be below model.{large}={getattr(model, large)}'
            )
    if model.rope_scaling_factor != 1 and model.rope_scaling == 'none':
        raise InputError(
            f'model.rope_scaling_factor={model.rope_scaling_factor} has no effect with model.rope_scaling=none; set '
            'model.rope_scaling to linear, dynamic, yarn, llama3 or longrope'
        )
    if model.position_embedding != 'rotary':
        if model.rope_scaling != 'none':
            raise InputError(
                f'model.rope_scaling={model.rope_scaling} requires rotary positions, but '
                f'model.position_embedding={model.position_embedding}; set model.position_embedding=rotary'
            )
        return
    head_dim = model.qk_rope_head_dim or model.head_dim or model.dim // model.num_heads
    rotated = round(model.partial_rotary_factor * head_dim)
    if rotated % 2:
        raise InputError(
            f'model.partial_rotary_factor={model.partial_rotary_factor} of head_dim {head_dim} is an odd number of '
            'dimensions; choose a factor that gives an even number, since rotary positions rotate pairs'
        )
    for key in ('rope_short_factors', 'rope_long_factors'):
        factors, num = getattr(model, key), rotated // 2 if model.rope_scaling == 'longrope' else 0
        if len(factors) != num or any(type(factor) not in (int, float) or factor not in FACTOR for factor in factors):
            raise InputError(
                f'model.{key} has {len(factors)} values with model.rope_scaling={model.rope_scaling}; set {num} '
                f'numbers, each {FACTOR}'
            )
    if model.rope_scaling == 'dynamic' and rotated <= 2:
        raise InputError(f'model.rope_scaling=dynamic requires at least 4 rotated dimensions, found {rotated}')


def _check_attention_pattern(model: ModelConfig) -> None:
    pattern = model.attention_pattern
    if not pattern or set(pattern) - set('LSN'):
        raise InputError(
            f'model.attention_pattern={pattern!r}: use the letters L (full attention), S (sliding window) and N (full '
            'attention without rotary positions), e.g. SSSL'
        )
    if 'N' in pattern and model.position_embedding != 'rotary':
        raise InputError(
            f'model.attention_pattern={pattern} with model.position_embedding={model.position_embedding}: N is for '
            'rotary positions; use L instead'
        )
    if len(pattern) > model.num_layers:
        raise InputError(
            f'model.attention_pattern={pattern} has {len(pattern)} letters for {model.num_layers} layers; use at most '
            'one letter per layer'
        )
    if ('S' in pattern) != (model.sliding_window > 0):
        raise InputError(
            f'model.sliding_window={model.sliding_window} with model.attention_pattern={pattern}: set a window of at '
            'least 1 token if the pattern contains S, and 0 otherwise'
        )


def _check_value_embeddings(model: ModelConfig) -> None:
    pattern, channels = model.value_embedding_pattern, model.value_gate_channels
    if pattern and not ('V' in pattern and set(pattern) <= set('NV')):
        raise InputError(
            f'model.value_embedding_pattern={pattern}: use the letters V (value embedding) and N (none), with at least '
            "one V, e.g. NV, or '' for none"
        )
    if len(pattern) > model.num_layers:
        raise InputError(
            f'model.value_embedding_pattern={pattern} has {len(pattern)} letters for {model.num_layers} layers; use at '
            'most one letter per layer'
        )
    if channels and not pattern:
        raise InputError(
            f'model.value_gate_channels={channels} has no effect without value embeddings; set '
            'model.value_embedding_pattern, or set model.value_gate_channels=0'
        )
    if channels > model.dim:
        raise InputError(
            f'model.value_gate_channels={channels} is above model.dim={model.dim}, the number of channels of the input '
            f'of attention; set it to {model.dim} or less'
        )
    relative, absolute = model.relative_attention_multiplier, model.attention_multiplier
    if relative != 1 and absolute:
        raise InputError(
            f'model.relative_attention_multiplier={relative} with model.attention_multiplier={absolute}: set '
            'model.attention_multiplier=0, or include the factor in it and set model.relative_attention_multiplier=1'
        )


def _check_norms(model: ModelConfig) -> None:
    if model.parallel_residual and model.norm_placement != 'pre':
        raise InputError(
            f'model.norm_placement={model.norm_placement} with model.parallel_residual=True: parallel branches have '
            'only norms of their input; set model.norm_placement=pre'
        )
    if model.norm_unit_offset and not model.norm_use_scale:
        raise InputError(
            'model.norm_unit_offset=True with model.norm_use_scale=False: the norms have no scale; set '
            'model.norm_unit_offset=False'
        )


def _check_stream(model: ModelConfig) -> None:
    if model.smear_channels > model.dim:
        raise InputError(
            f'model.smear_channels={model.smear_channels} exceeds model.dim={model.dim}, the channels of an embedding; '
            f'set it to {model.dim} or less'
        )
    if model.backout_layer >= model.num_layers:
        raise InputError(
            f'model.backout_layer={model.backout_layer} is none of the layers 0 to {model.num_layers - 1}; use '
            f'{model.num_layers // 2} as nanochat, or -1 for none'
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
    if model.matmul_precision != 'default':
        raise InputError(
            f'model.matmul_precision={model.matmul_precision} does not support model.num_experts={E}; set '
            'model.matmul_precision=default'
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


def check_mtp(config: Config) -> None:
    """Checks that the objective trains the modules of multi-token prediction, if the model has any.

    Raises:
        InputError: the objective does not use them.
    """
    depth, objective = config.model.mtp_depth, config.train.objective
    if depth and objective != 'next_token':
        raise InputError(
            f'model.mtp_depth={depth} with train.objective={objective}: only next_token trains the modules of '
            'multi-token prediction; set model.mtp_depth=0 (a checkpoint in train.init_from may contain modules)'
        )
