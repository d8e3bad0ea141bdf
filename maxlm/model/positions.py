"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split layout of GPT-NeoX and Llama.

Shapes: B batch, T length, N heads, H head dim, P rotated pairs (R = 2P rotated dims), 1 broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotary(NamedTuple):
    """Angles of a batch of positions, one per rotated pair; shared by all layers."""

    cos_BT1P: jax.Array
    sin_BT1P: jax.Array


def rotary_angles(positions_BT: jax.Array, *, head_dim: int, fraction: float, theta: float) -> Rotary:
    """Angles position · theta^(-2i/R) for the R = fraction · head_dim rotated dims, in float32."""
    rotated = round(fraction * head_dim)
    frequency_P = theta ** -(jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated)
    angle_BT1P = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_P
    return Rotary(jnp.cos(angle_BT1P), jnp.sin(angle_BT1P))


def rotate(x_BTNH: jax.Array, rotary: Rotary) -> jax.Array:
    """Turns the pairs (i, i + R/2) of the first R dims of each head; the other dims pass."""
    half = rotary.cos_BT1P.shape[-1]
    x = x_BTNH.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x_BTNH[..., 2 * half :]
    cos, sin = rotary
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BTNH.dtype), rest], axis=-1)
