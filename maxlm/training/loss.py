"""Next-token cross-entropy, over chunks of the sequence.

Shapes: B batch, T length, C positions of a chunk, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def cross_entropy_sum(
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    logits: Callable[[jax.Array], jax.Array],
    chunk: int,
) -> jax.Array:
    """Sum over positions of weight · -log softmax(logits)[target], in nats, float32.

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
    def chunk_sum(hidden_BCD: jax.Array, targets_BC: jax.Array, weights_BC: jax.Array) -> jax.Array:
        logits_BCV = logits(hidden_BCD)
        target_logit_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return jnp.sum(weights_BC * (jax.nn.logsumexp(logits_BCV, axis=-1) - target_logit_BC))

    if chunks == 1:
        return chunk_sum(hidden_BTD, targets_BT, weights_BT)

    def add(total: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + chunk_sum(*inputs), None

    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), (split(hidden_BTD), split(targets_BT), split(weights_BT)))
    return total
