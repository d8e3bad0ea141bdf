"""Attention over the slots of a key/value cache.

A cache of latent attention (`maxlm.model.attention.latent`) has one head, K = 1. Its keys are latents, which are also
the values, and its values are rotated keys. A query is then the concatenation of the queries of both.

Shapes: B batch, T query length, S slots, N query heads, K key/value heads, G = N/K, H head dim, X blocks of queries.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from maxlm.model.attention.chunked import QUERY_BLOCK
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache, Slots
from maxlm.model.layers.softcap import softcap as capped

# Running maximum of scores, sum of weights, and weighted sum of values.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


def attend_cached(
    q_BTNH: jax.Array,
    cache: LayerCache,
    indices: CacheIndices,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
    is_latent: bool = False,
    softcap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax(scale · q·k) · v over the unmasked slots, [B, T, N, H] in the dtype of q.

    Args:
        q_BTNH: queries.
        cache: cache of the layer.
        indices: slots of the call.
        mask_BTS: True where a query attends to a slot.
        scale: factor of the scores; None: 1 / sqrt(H).
        is_latent: the cache is one of latent attention.
        softcap: limit of the scores; 0: none.
        sinks_N: logit of each head that joins the denominator of its softmax; None: no sinks.
    """
    if len(cache.blocks) == 1:
        slots = cache.read(0, indices.first_row, len(q_BTNH))
        return attend_slots(q_BTNH, slots, mask_BTS, scale=scale, is_latent=is_latent, softcap=softcap, sinks_N=sinks_N)
    return _attend_blocks(q_BTNH, cache, indices, mask_BTS, scale, is_latent, softcap, sinks_N)


def _attend_blocks(
    q_BTNH: jax.Array,
    cache: LayerCache,
    indices: CacheIndices,
    mask_BTS: jax.Array,
    scale: float | None,
    is_latent: bool,
    softcap: float,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Attends to one block of slots after the other, skipping unused ones (Milakov & Gimelshein 2018)."""
    B, T, N, _ = q_BTNH.shape
    key_LBKSH, value_LBKSH, *_ = cache.blocks[0]
    q_BKGTH = _grouped(q_BTNH, key_LBKSH.shape[2], scale)

    def add(sums: _Sums, block: int, mask_BTs: jax.Array) -> _Sums:
        largest_BKGT, sum_BKGT, o_BKGTH = sums
        slots = cache.read(block, indices.first_row, B)
        scores_BKGTs = _scores(q_BKGTH, slots, mask_BTs, is_latent, softcap)
        new_BKGT = jnp.maximum(largest_BKGT, scores_BKGTs.max(axis=-1))
        weights_BKGTs = jnp.exp(scores_BKGTs - new_BKGT[..., None])
        before_BKGT = jnp.exp(largest_BKGT - new_BKGT)
        o_BKGTH = o_BKGTH * before_BKGT[..., None] + _weighted(weights_BKGTs, slots, q_BTNH.dtype, is_latent)
        return new_BKGT, sum_BKGT * before_BKGT + weights_BKGTs.sum(axis=-1), o_BKGTH

    width = (key_LBKSH if is_latent else value_LBKSH).shape[-1]
    zeros = jnp.zeros((*q_BKGTH.shape[:-1], width), jnp.float32)
    sums: _Sums = jnp.full(q_BKGTH.shape[:-1], jnp.finfo(jnp.float32).min), zeros[..., 0], zeros
    if sinks_N is not None:
        # A sink is the first key, with a value of 0.
        sinks_BKGT = jnp.broadcast_to(sinks_N.reshape(*q_BKGTH.shape[1:3], 1), q_BKGTH.shape[:-1])
        sums = sinks_BKGT, jnp.ones_like(sinks_BKGT), zeros
    start = 0
    for number, block in enumerate(cache.blocks):
        end = start + block.num_slots
        add_block = partial(add, block=number, mask_BTs=mask_BTS[..., start:end])
        sums = jax.lax.cond(indices.end > start, add_block, lambda sums: sums, sums)
        start = end
    _, sum_BKGT, o_BKGTH = sums
    # The sums are 0 if all rows are empty.
    o_BKGTH /= jnp.maximum(sum_BKGT, jnp.finfo(jnp.float32).tiny)[..., None]
    return o_BKGTH.astype(q_BTNH.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, width)


def attend_slots(
    q_BTNH: jax.Array,
    slots: Slots,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
    is_latent: bool = False,
    softcap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attends with a mask over queries and slots, one block of queries at a time (Rabe & Staats 2021)."""
    B, T, N, _ = q_BTNH.shape
    K = slots.key_BKSH.shape[1]
    q_BKGTH = _grouped(q_BTNH, K, scale)

    sinks_KG = None if sinks_N is None else sinks_N.reshape(K, N // K)

    def attend_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BKGTH, mask_BTS = block
        weights_BKGTS = softmax_with_sinks(_scores(q_BKGTH, slots, mask_BTS, is_latent, softcap), sinks_KG)
        return _weighted(weights_BKGTS, slots, q_BTNH.dtype, is_latent).astype(q_BTNH.dtype)

    if T <= QUERY_BLOCK or T % QUERY_BLOCK:
        o_BKGTH = attend_block((q_BKGTH, mask_BTS))
    else:
        o_XBKGTH = jax.lax.map(attend_block, (_blocks(q_BKGTH, axis=3), _blocks(mask_BTS, axis=1)))
        o_BKGTH = jnp.moveaxis(o_XBKGTH, 0, 3).reshape(B, K, N // K, T, -1)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


def softmax_with_sinks(scores_BKGTS: jax.Array, sinks_KG: jax.Array | None) -> jax.Array:
    """Returns exp(score) / (Σ exp(score) + exp(sink)) over the last axis; without sinks, the softmax."""
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    if sinks_KG is None:
        return weights_BKGTS
    log_z_BKGT1 = jax.nn.logsumexp(scores_BKGTS, axis=-1, keepdims=True)
    return weights_BKGTS * jax.nn.sigmoid(log_z_BKGT1 - sinks_KG[None, :, :, None, None])


def _grouped(q_BTNH: jax.Array, num_kv_heads: int, scale: float | None) -> jax.Array:
    """Returns scaled queries grouped by key/value head, [B, K, G, T, H]."""
    B, T, N, H = q_BTNH.shape
    K = num_kv_heads
    scale = 1 / math.sqrt(H) if scale is None else scale
    return q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * scale


def _scores(q_BKGTH: jax.Array, slots: Slots, mask_BTS: jax.Array, is_latent: bool, softcap: float) -> jax.Array:
    """Returns masked scores in float32, [B, K, G, T, S]."""
    if is_latent:
        width = slots.key_BKSH.shape[-1]
        scores_BKGTS = _products(q_BKGTH[..., :width], slots.key_BKSH, slots.key_scale_BKS)
        scores_BKGTS += _products(q_BKGTH[..., width:], slots.value_BKSH, slots.value_scale_BKS)
    else:
        scores_BKGTS = _products(q_BKGTH, slots.key_BKSH, slots.key_scale_BKS)
    scores_BKGTS = capped(scores_BKGTS, softcap)
    # The smallest finite value instead of -inf, so that fully masked rows (padding) stay finite.
    return jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


def _products(q_BKGTH: jax.Array, k_BKSH: jax.Array, scale_BKS: jax.Array | None) -> jax.Array:
    k_BKSH = k_BKSH.astype(q_BKGTH.dtype)
    scores_BKGTS = jnp.einsum('BKGTH,BKSH->BKGTS', q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    return scores_BKGTS if scale_BKS is None else scores_BKGTS * scale_BKS[:, :, None, None, :]


def _weighted(weights_BKGTS: jax.Array, slots: Slots, dtype: jnp.dtype, is_latent: bool) -> jax.Array:
    """Returns the weighted sum of values in float32, [B, K, G, T, H]; the products are computed in `dtype`."""
    values, scale_BKS = slots.value_BKSH, slots.value_scale_BKS
    if is_latent:
        values, scale_BKS = slots.key_BKSH, slots.key_scale_BKS
    if scale_BKS is not None:
        weights_BKGTS *= scale_BKS[:, :, None, None, :]
    v_BKSH = values.astype(dtype)
    return jnp.einsum('BKGTS,BKSH->BKGTH', weights_BKGTS.astype(dtype), v_BKSH, preferred_element_type=jnp.float32)


def _blocks(x: jax.Array, axis: int) -> jax.Array:
    """Splits an axis of length T into a leading axis of X blocks and an axis of QUERY_BLOCK queries."""
    x = x.reshape(*x.shape[:axis], -1, QUERY_BLOCK, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
