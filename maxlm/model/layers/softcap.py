"""Soft limits of logits and attention scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softcap(logits: jax.Array, cap: float) -> jax.Array:
    """Limits logits to ±cap with a tanh (Gemma Team 2024, "Gemma 2"); a cap of 0 disables it."""
    return cap * jnp.tanh(logits / cap) if cap else logits
