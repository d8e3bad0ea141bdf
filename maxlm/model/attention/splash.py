"""Causal attention on TPUs by JAX's fused kernel ("splash"), for whole rows, within packed documents, with a window.

The kernel works on blocks of queries and keys. Which blocks the mask touches is known when the program is compiled, and
only those are computed; where documents begin is known on the device alone, and hides scores within them.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.resolve import SPLASH_MULTIPLE
from maxlm.model.attention.chunked import ATTENDED
from maxlm.parallel.partitioning import Partitioning

# Queries and keys of a block, at most: MaxText's default for all of the kernel's blocks.
BLOCK = 512


def supports_length(length: int) -> bool:
    """Whether the kernel can cut rows of this length into blocks."""
    return length % SPLASH_MULTIPLE == 0


def block_size(length: int) -> int:
    """Queries, and keys, of a block: the most that divide a length which `supports_length` takes."""
    return next(size for size in range(BLOCK, 0, -SPLASH_MULTIPLE) if length % size == 0)


def blocks_in_sight(length: int, window: int) -> int:
    """Pairs of a block of queries and one of keys that are computed; `window` as in `attend_splash`."""
    size = block_size(length)
    pairs = ((query, key) for query in range(length // size) for key in range(query + 1))
    # From the first query of a block to the last key of an earlier one.
    return sum(not window or (query - key - 1) * size + 1 < window for query, key in pairs)


def attend_splash(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    *,
    window: int,
    placement: Partitioning,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q·k / sqrt(H)) · v over the keys up to the query's position, of its own document.

    Args:
        q_BTNH: queries; k_BTKH, v_BTKH: keys and values, K dividing N; T as `supports_length` wants it.
        segments_BT: number of the document that a token belongs to; None: each row is one.
        window: how many last tokens a query sees, its own included; 0: all.
        placement: every device works on its own rows and heads.
        interpret: without the kernel's compiler, for other devices; slow.

    Returns:
        [B, T, N, H] in q's type.
    """

    def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
        segments = rest[0] if segments_BT is not None else None
        return _attend(q, k, v, segments, window, interpret)

    arrays = [q_BTNH, k_BTKH, v_BTKH] + ([] if segments_BT is None else [segments_BT])
    if placement.num_shards('batch') * placement.num_shards('heads') > 1:
        rows = ('batch', 'length')
        heads, kv_heads = (*rows, 'heads', 'head_dim'), (*rows, 'kv_heads', 'head_dim')
        # XLA does not know how to split a kernel.
        axes = [heads, kv_heads, kv_heads, rows][: len(arrays)]
        attend_shard = placement.per_shard(attend_shard, axes, heads, 'heads')
    return attend_shard(*arrays)


def _attend(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None, window: int, interpret: bool
) -> jax.Array:
    # Takes half a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, T, N, H = q_BTNH.shape
    mask = splash.LocalMask((T, T), (window - 1, 0), 0) if window else splash.CausalMask((T, T))
    size = block_size(T)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * N),
        # One kernel for all three gradients would write that of q once for each block of keys.
        block_sizes=splash.BlockSizes(
            block_q=size,
            block_kv=size,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_q_dq=size,
            block_kv_dq=size,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )

    def attend_row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, segments_T: jax.Array | None) -> jax.Array:
        return kernel(q_NTH, k_KTH, v_KTH, None if segments_T is None else splash.SegmentIds(segments_T, segments_T))

    # The kernel has no scale of its own. In float32: the scale itself would lose more than its product does.
    q_BTNH = (q_BTNH.astype(jnp.float32) * (1 / math.sqrt(H))).astype(q_BTNH.dtype)
    q_BNTH, k_BKTH, v_BKTH = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    return jax.vmap(attend_row)(q_BNTH, k_BKTH, v_BKTH, segments_BT).swapaxes(1, 2)
