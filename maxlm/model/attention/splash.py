"""Causal attention on TPUs with JAX's fused "splash" kernel, optionally within packed documents and with a window.

The kernel processes blocks of queries and keys. Causality and window are known at compile time, so fully masked blocks
are not computed. Document boundaries are known only at run time and mask scores within computed blocks.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from maxlm.config.kernels import SPLASH_MULTIPLE
from maxlm.model.attention.chunked import ATTENDED

# Largest number of queries and keys of a block; MaxText's default for all blocks of the kernel.
BLOCK = 512


def supports_length(length: int) -> bool:
    """Returns True if the kernel can split rows of this length into blocks."""
    return length % SPLASH_MULTIPLE == 0


def block_size(length: int) -> int:
    """Returns the number of queries and keys of a block, the largest that divides a supported length."""
    return next(size for size in range(BLOCK, 0, -SPLASH_MULTIPLE) if length % size == 0)


def num_visible_blocks(length: int, window: int) -> int:
    """Returns the number of computed pairs of query and key blocks; `window` is that of `attend_splash`."""
    size = block_size(length)
    pairs = ((query, key) for query in range(length // size) for key in range(query + 1))
    # The distance from the first query of a block to the last key of an earlier block must be within the window.
    return sum(not window or (query - key - 1) * size + 1 < window for query, key in pairs)


def attend_splash(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    *,
    window: int,
    softcap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax(q·k / sqrt(H)) · v over the keys of the query's document up to its position.

    Args:
        q_BTNH: queries; `supports_length(T)` must be True.
        k_BTKH: keys; K divides N.
        v_BTKH: values.
        segments_BT: number of each token's document; None: each row is one document.
        window: number of last tokens to which a query attends, including itself; 0: all.
        softcap: limit of the scores (`maxlm.model.layers.softcap`); 0: none.
        interpret: if True, interpret the kernel instead of compiling it, which is slow but works on other devices.

    Returns:
        [B, T, N, H] in the dtype of q.
    """
    # Imported here, because the import takes half a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, T, N, H = q_BTNH.shape
    mask = splash.LocalMask((T, T), (window - 1, 0), 0) if window else splash.CausalMask((T, T))
    size = block_size(T)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * N),
        # A fused kernel for all three gradients would write the gradient of q once per block of keys.
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
        attn_logits_soft_cap=softcap or None,
        interpret=interpret,
    )

    def attend_row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, segments_T: jax.Array | None) -> jax.Array:
        return kernel(q_NTH, k_KTH, v_KTH, None if segments_T is None else splash.SegmentIds(segments_T, segments_T))

    # The kernel does not scale. The scaling is done in float32, because rounding the scale itself would lose more
    # precision than rounding the product.
    q_BTNH = (q_BTNH.astype(jnp.float32) * (1 / math.sqrt(H))).astype(q_BTNH.dtype)
    q_BNTH, k_BKTH, v_BKTH = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    return jax.vmap(attend_row)(q_BNTH, k_BKTH, v_BKTH, segments_BT).swapaxes(1, 2)
