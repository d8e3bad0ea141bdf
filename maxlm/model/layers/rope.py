"""Rotary position embedding, RoPE (Su et al. 2021, RoFormer), in the half-split layout of GPT-NeoX and Llama.

Shapes: B batch, T length, N heads, H head dim, P rotated pairs (R = 2P rotated dims), 1 broadcast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig


class Rotary(NamedTuple):
    """Cosines and sines of the angles of a batch of positions, one per rotated pair; shared by all layers."""

    cos_BT1P: jax.Array
    sin_BT1P: jax.Array


def rotary_angles(positions_BT: jax.Array, config: ModelConfig, length_B: jax.Array | None = None) -> Rotary:
    """Returns the angles position · frequency of the R rotated dims of a head, in float32.

    `length_B` is the number of tokens in each row so far, which dynamic and longrope scaling use. None: the largest
    position plus one.
    """
    if config.rope_scaling in ('dynamic', 'longrope'):
        if length_B is None:
            length_B = positions_BT.max(axis=1) + 1
        scaled = _dynamic_frequencies if config.rope_scaling == 'dynamic' else _longrope_frequencies
        frequency_BT1P = scaled(config, length_B)[:, None, None, :]
    else:
        frequency_BT1P = _frequencies(config)[None, None, None, :]
    angle_BT1P = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_BT1P
    scale = _attention_factor(config)
    return Rotary(jnp.cos(angle_BT1P) * scale, jnp.sin(angle_BT1P) * scale)


def rotate(x_BTNH: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of the first R dims of each head; the remaining dims are unchanged."""
    half = rotary.cos_BT1P.shape[-1]
    x = x_BTNH.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x_BTNH[..., 2 * half :]
    cos, sin = rotary
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BTNH.dtype), rest], axis=-1)


def score_factor(config: ModelConfig) -> float:
    """Returns the factor of the scores of latent attention, mscale² (DeepSeek-AI 2024, "DeepSeek-V2", and its code)."""
    return (0.1 * config.rope_mscale_all_dim * math.log(config.rope_scaling_factor) + 1.0) ** 2


def _frequencies(config: ModelConfig) -> jax.Array:
    """Returns the radians per position of each pair [P], scaled according to `model.rope_scaling`."""
    frequency_P = config.rope_theta ** _exponents(config)
    factor = config.rope_scaling_factor
    if config.rope_scaling == 'linear':
        # Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".
        return frequency_P / factor
    if config.rope_scaling == 'yarn':
        # Peng et al. 2023, "YaRN". Pairs with many rotations within the original context are kept, and pairs with few
        # rotations are interpolated. Between them is a linear ramp over the index of the pair.
        low, high = _yarn_bounds(config)
        ramp_P = jnp.clip((jnp.arange(frequency_P.size, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return frequency_P / factor * ramp_P + frequency_P * (1 - ramp_P)
    if config.rope_scaling == 'llama3':
        # Llama 3.1 (Grattafiori et al. 2024, and its reference code): the same with a ramp over the rotations.
        turns_P = config.original_max_positions * frequency_P / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept_P = jnp.clip((turns_P - low) / (high - low), 0, 1)
        return frequency_P / factor * (1 - kept_P) + frequency_P * kept_P
    assert config.rope_scaling == 'none', config.rope_scaling
    return frequency_P


def _dynamic_frequencies(config: ModelConfig, length_B: jax.Array) -> jax.Array:
    """Returns the radians per position [B, P] of dynamic NTK scaling.

    The base grows with the length beyond the original context (bloc97 and emozilla 2023, as in YaRN's appendix). Cached
    keys keep the rotation for the length at which they were written, as in other implementations.
    """
    rotated = _num_rotated(config)
    original, factor = config.original_max_positions, config.rope_scaling_factor
    stretch_B = factor * jnp.maximum(length_B, original).astype(jnp.float32) / original - (factor - 1)
    theta_B1 = config.rope_theta * stretch_B[:, None] ** (rotated / (rotated - 2))
    return theta_B1 ** _exponents(config)[None, :]


def _longrope_frequencies(config: ModelConfig, length_B: jax.Array) -> jax.Array:
    """Returns the radians per position [B, P] of LongRoPE (Ding et al. 2024).

    Each pair has a divisor for rows within the original context and one for longer rows. Cached keys keep the rotation
    for the length at which they were written, as in other implementations.
    """
    short_P, long_P = (jnp.array(x, jnp.float32) for x in (config.rope_short_factors, config.rope_long_factors))
    is_long_B1 = (length_B > config.original_max_positions)[:, None]
    return config.rope_theta ** _exponents(config)[None, :] / jnp.where(is_long_B1, long_P[None, :], short_P[None, :])


def _exponents(config: ModelConfig) -> jax.Array:
    """Returns the exponents of theta [P] that give the unscaled radians per position of each pair."""
    rotated = _num_rotated(config)
    return -(jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated)


def _num_rotated(config: ModelConfig) -> int:
    return config.qk_rope_head_dim or round(config.partial_rotary_factor * config.head_dim)


def _yarn_bounds(config: ModelConfig) -> tuple[float, float]:
    """Returns the pair indices at which YaRN's ramp begins and ends."""
    rotated = _num_rotated(config)

    def pair_with(turns: float) -> float:
        wavelength = config.original_max_positions / (turns * 2 * math.pi)
        return rotated * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = pair_with(config.rope_beta_fast), pair_with(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    # Equal bounds would divide by zero; the ramp becomes a step.
    return low, high if high != low else high + 0.001


def _attention_factor(config: ModelConfig) -> float:
    if config.rope_scaling == 'longrope':
        return config.rope_attention_factor or longrope_attention_factor(
            config.rope_scaling_factor, config.original_max_positions
        )
    if config.rope_scaling != 'yarn':
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(config.rope_scaling_factor) + 1.0


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """Returns LongRoPE's factor of queries and keys for an extension of the context by `factor`."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions)) if factor > 1 else 1.0
