"""Known answers of attention: training within packed documents, and over the slots of a cache.

Shapes: B batch, T query length, S key length, N query heads, K key/value heads, G = N/K, H head dim, C queries of a
block.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.decode import attend_slots
from maxlm.model.attention.kernels import AttentionInputs, choose_attention_kernel
from maxlm.model.layers.kv_cache import Slots, encode
from maxlm.model.layers.masks import causal_mask
from maxlm.model.layers.softcap import softcap as capped
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import OTHER_VERSIONS, KnownAnswer, floats, normal, with_gradients

# Mean length of the random documents, and queries whose scores the formula computes at the same time.
DOCUMENT, BLOCK = 200, 128
# Operations of the formula: about a second on a GPU without matrix units for float32.
MAX_FLOPS = 2e13
GRADIENTS = ('gradient of q', 'gradient of k', 'gradient of v')


def attention_answer(
    model: ModelConfig,
    *,
    rows: int,
    length: int,
    window: int,
    has_documents: bool,
    heads: tuple[int, int],
    is_pipelined: bool = False,
) -> KnownAnswer:
    """Returns the attention of a training step on one device, and its gradients.

    Args:
        model: resolved config of the model.
        rows: largest number of rows; fewer if the formula would take too long.
        length: number of tokens of a row.
        window: number of last tokens to which a query attends; 0: all.
        has_documents: rows contain several documents.
        heads: numbers of query heads and key/value heads on the device.
        is_pipelined: the layers are in stages, for which cuDNN takes a mask instead of a list of documents.
    """
    (N, K), H, T = heads, model.head_dim, length
    B = max(1, min(rows, int(MAX_FLOPS / (18 * N * T * T * H))))
    rng = np.random.default_rng(0)
    shapes = [(B, T, heads, H) for heads in (N, N, K, K)]
    do, q, k, v = (normal(rng, shape, model.dtype) for shape in shapes)
    segments_BT = documents(rng, B, T)
    sinks_N = jnp.asarray(rng.standard_normal(N, np.float32)) if model.attention_sinks else None
    kernel = choose_attention_kernel(model, SINGLE_DEVICE)

    def run(do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, ...]:
        mask_BTS = same_document(segments_BT, window) if has_documents else None
        has_segments = has_documents and not (is_pipelined and model.attention == 'cudnn')
        segments = segments_BT if has_segments else None

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            inputs = AttentionInputs(q, k, v, mask_BTS, segments, model.attention_softcap, sinks_N)
            return kernel(inputs, window, SINGLE_DEVICE)

        return with_gradients(attend, do, q, k, v)

    def exact(do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, ...]:
        segments = segments_BT if has_documents else jnp.zeros_like(segments_BT)
        attend = partial(
            exact_attention, segments_BT=segments, window=window, softcap=model.attention_softcap, sinks_N=sinks_N
        )
        return with_gradients(attend, *floats(do, q, k, v))

    within = ' within documents' if has_documents else ''
    return KnownAnswer(
        f'attention{within} (model.attention={model.attention})',
        f'{B} × {T:,} tokens, {N} query heads and {K} key heads of {H}' + (f', window {window}' if window else ''),
        run,
        exact,
        (do, q, k, v, segments_BT),
        ('output', *GRADIENTS),
        model.dtype,
        'set model.attention=xla' if model.attention != 'xla' else OTHER_VERSIONS,
    )


def cache_answer(model: ModelConfig, *, rows: int, slots: int, int8: bool, heads: tuple[int, int]) -> KnownAnswer:
    """Returns the attention of one token of each row to the slots of a cache, which are filled to different lengths."""
    (N, K), H, S = heads, model.head_dim, slots
    rng = np.random.default_rng(0)
    q_BTNH = normal(rng, (rows, 1, N, H), model.dtype)
    k, v = (normal(rng, (rows, S, K, H), model.dtype) for _ in range(2))
    used_B = rng.integers(1, S + 1, rows)
    mask_BTS = jnp.asarray(np.arange(S) < used_B[:, None, None])
    sinks_N = jnp.asarray(rng.standard_normal(N, np.float32)) if model.attention_sinks else None
    settings: dict[str, Any] = {'softcap': model.attention_softcap, 'sinks_N': sinks_N}

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        if not int8:
            return (attend_slots(q, Slots(k.swapaxes(1, 2), v.swapaxes(1, 2), None, None), mask_BTS, **settings),)
        (k, k_scale), (v, v_scale) = encode(k), encode(v)
        slots = Slots(*(x.swapaxes(1, 2) for x in (k, v, k_scale, v_scale)))
        return (attend_slots(q, slots, mask_BTS, **settings),)

    def exact(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        if int8:
            (k, k_scale), (v, v_scale) = encode(k), encode(v)
            k, v = k * k_scale[..., None], v * v_scale[..., None]
        q, k, v = floats(q, k, v)
        return (_attend(q, k, v, mask_BTS, **settings),)

    return KnownAnswer(
        f'attention to a cache of {"int8" if int8 else model.dtype}',
        f'{rows} rows of {S:,} slots, {N} query heads and {K} key heads of {H}',
        run,
        exact,
        (q_BTNH, k, v),
        ('output',),
        model.dtype,
        'set --kv-cache-dtype=model' if int8 else OTHER_VERSIONS,
    )


def documents(rng: np.random.Generator, B: int, T: int) -> np.ndarray:
    """Returns segment ids [B, T]: a document of one token, random ones, and padding (0) at the end of the last row."""
    is_first = rng.random((B, T)) < 1 / DOCUMENT
    is_first[:, :2] = True
    segments = np.cumsum(is_first, axis=1, dtype=np.int32)
    segments[-1, T - T // 8 :] = 0
    return segments


def same_document(segments_BT: jax.Array, window: int) -> jax.Array:
    """Returns the mask [B, T, S] of a training step."""
    T = segments_BT.shape[1]
    is_same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    return is_same_BTS & causal_mask(jnp.arange(T)[None], T, window)


def exact_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array,
    window: int,
    softcap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention within documents by its formula, for one row and one block of queries at a time."""
    T = q_BTNH.shape[1]
    C = math.gcd(T, BLOCK) if T % BLOCK else BLOCK

    def attend_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q_TNH, k_SKH, v_SKH, segments_T = row

        # The backward pass computes the scores of a block again instead of keeping those of all blocks.
        @jax.checkpoint
        def attend_block(first: jax.Array) -> jax.Array:
            q_CNH, segments_C = (jax.lax.dynamic_slice_in_dim(x, first, C) for x in (q_TNH, segments_T))
            behind_CS = first + jnp.arange(C)[:, None] - jnp.arange(T)[None, :]
            sees_CS = (behind_CS >= 0) & (behind_CS < (window or T)) & (segments_C[:, None] == segments_T[None, :])
            return _attend(q_CNH[None], k_SKH[None], v_SKH[None], sees_CS[None], softcap=softcap, sinks_N=sinks_N)[0]

        blocks_GCNH: jax.Array = jax.lax.map(attend_block, jnp.arange(0, T, C))
        return blocks_GCNH.reshape(T, *q_TNH.shape[1:])

    out_BTNH: jax.Array = jax.lax.map(attend_row, (q_BTNH, k_BSKH, v_BSKH, segments_BT))
    return out_BTNH


def _attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, sees_BTS: jax.Array, *, softcap: float, sinks_N: Any
) -> jax.Array:
    """Returns softmax(q·k / sqrt(H)) · v in float32; a sink is a key with this logit and the value 0."""
    B, T, N, H = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(B, T, k_BSKH.shape[2], -1, H)
    scores_BKGTS = capped(jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH) / math.sqrt(H), softcap)
    scores_BKGTS = jnp.where(sees_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.reshape(1, *scores_BKGTS.shape[1:3], 1, 1), (*scores_BKGTS.shape[:4], 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, sinks], axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)[..., : k_BSKH.shape[1]]
    return jnp.einsum('BKGTS,BSKH->BTKGH', weights_BKGTS, v_BSKH).reshape(B, T, N, -1)
