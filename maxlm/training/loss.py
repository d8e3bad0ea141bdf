"""Next-token cross-entropy and log Z of the softmax, over chunks of the sequence.

Shapes: B batch, T length, C positions of a chunk, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    length_parts: int = 1,
    row_groups: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the positions of each row of weight · -log softmax(logits)[target], in nats, and of weight · log² Z.

    Both are float32 [B].

    Z is the softmax's denominator Σ exp(logits), which the z-loss of Chowdhery et al. 2022, "PaLM", keeps near 1.

    Args:
        hidden_BTD: the model's last hidden states.
        targets_BT: ids of the tokens to predict.
        weights_BT: 1 where there is one, else 0.
        logits: maps hidden states [B, C, D] to scores [B, C, V]. It is called on a part of the positions at a time and
            called again in the backward pass, so that scores of one call are all that ever exist.
        chunk: positions of each row in a call.
        length_parts: devices that the length is split over; each takes `chunk` of its own positions.
        row_groups: calls that the rows are spread over. Row r is in group r mod row_groups, so that no row changes its
            device.
    """
    B, T = targets_BT.shape
    if row_groups > 1:

        def group(x: jax.Array) -> jax.Array:
            return x.reshape(-1, row_groups, *x.shape[1:]).swapaxes(0, 1)

        sums = partial(cross_entropy_sum, logits=logits, chunk=chunk, length_parts=length_parts)
        groups = (group(hidden_BTD), group(targets_BT), group(weights_BT))
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B), jax.lax.map(lambda rows: sums(*rows), groups))
    chunk = min(chunk, T // length_parts)
    # Positions that fill the last chunk have weight 0.
    filler = -(T // length_parts) % chunk
    chunks = (T // length_parts + filler) // chunk

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(B, length_parts, -1, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, filler)] + [(0, 0)] * (x.ndim - 3))
        x = jnp.moveaxis(x.reshape(B, length_parts, chunks, chunk, *x.shape[3:]), 2, 0)
        return x.reshape(chunks, B, length_parts * chunk, *x.shape[4:])

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
