"""Next-token cross-entropy and log Z of the softmax, over chunks of the sequence.

Shapes: B batch, T length, C positions of a chunk, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy_sum(
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    logits: Callable[[jax.Array], jax.Array],
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the positions of each row of weight · -log softmax(logits)[target], in nats, and of weight · log² Z.

    Both are float32 [B].

    Z is the softmax's denominator Σ exp(logits), which the z-loss of Chowdhery et al. 2022, "PaLM", keeps near 1.

    `logits` maps hidden states [B, C, D] to scores [B, C, V]. It is called on `chunk` positions at a time and called
    again in the backward pass, so that scores of B × chunk positions are all that ever exist.
    """
    B, T = targets_BT.shape
    chunk = min(chunk, T)
    # Positions that fill the last chunk have weight 0.
    filler = -T % chunk
    chunks = (T + filler) // chunk

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, filler)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def chunk_sums(hidden_BCD: jax.Array, targets_BC: jax.Array, weights_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BCV = logits(hidden_BCD)
        target_logit_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        losses_B = jnp.sum(weights_BC * (log_z_BC - target_logit_BC), axis=1)
        return losses_B, jnp.sum(weights_BC * jnp.square(log_z_BC), axis=1)

    if chunks == 1:
        return chunk_sums(hidden_BTD, targets_BT, weights_BT)

    def add(totals: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, totals, chunk_sums(*inputs)), None

    zeros = (jnp.zeros(B, jnp.float32), jnp.zeros(B, jnp.float32))
    totals, _ = jax.lax.scan(add, zeros, (split(hidden_BTD), split(targets_BT), split(weights_BT)))
    return totals
