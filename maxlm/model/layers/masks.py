"""Causal and sliding-window masks: how far each layer attends.

Shapes: B batch, T query length, S key length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig


def layer_windows(config: ModelConfig) -> list[int]:
    """For each layer the number of last tokens that it attends to; 0 for the whole context."""
    pattern = config.attention_pattern
    return [config.sliding_window if pattern[i % len(pattern)] == 'S' else 0 for i in range(config.num_layers)]


def causal_mask(positions_BT: jax.Array, num_keys: int, window: int) -> jax.Array:
    """True where the query at a position may see the key s = 0 … num_keys - 1: [B, T, S].

    Those up to its own position; with a window (not 0) only the last `window` of them.
    """
    behind_BTS = positions_BT[:, :, None] - jnp.arange(num_keys)[None, None, :]
    return (behind_BTS >= 0) & (behind_BTS < window) if window else behind_BTS >= 0
