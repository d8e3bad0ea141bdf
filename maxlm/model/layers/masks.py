"""Masks of attention scores: causal, with an optional sliding window, and within documents.

Shapes: B batch, T query length, S key length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig


def layer_kinds(config: ModelConfig) -> str:
    """Returns the letter of `model.attention_pattern` of each layer."""
    pattern = config.attention_pattern
    return ''.join(pattern[i % len(pattern)] for i in range(config.num_layers))


def window_of(kind: str, config: ModelConfig) -> int:
    """Returns the number of last tokens to which a layer attends, given its letter; 0 for the entire context."""
    return config.sliding_window if kind == 'S' else 0


def layer_windows(config: ModelConfig) -> list[int]:
    """Returns `window_of` for each layer."""
    return [window_of(kind, config) for kind in layer_kinds(config)]


def causal_mask(positions_BT: jax.Array, num_keys: int, window: int) -> jax.Array:
    """Returns the mask [B, T, S], True where a query attends to the key at position s = 0 … num_keys - 1.

    A query attends to the positions up to its own. If `window` is not 0, it attends only to the last `window` of them.
    """
    behind_BTS = positions_BT[:, :, None] - jnp.arange(num_keys)[None, None, :]
    return (behind_BTS >= 0) & (behind_BTS < window) if window else behind_BTS >= 0


def document_mask(length: int, segments_BT: jax.Array | None, window: int) -> jax.Array | None:
    """Returns the attention mask [B, T, S], or None without segments, where kernels apply causality and window."""
    if segments_BT is None:
        return None
    same_document_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_document_BTS & causal_mask(jnp.arange(length)[None, :], length, window)
