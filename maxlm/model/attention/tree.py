"""Tree attention over rows of token trees, in which texts share the tokens of common prefixes.

A row contains the tokens of a tree in depth-first order, so a text omits the prefix that it shares with previous texts.
A token attends to itself and its ancestors. Packed documents are the special case without shared prefixes.

Shapes: B batch, T length, S keys, R queries of a range, N query heads, K key/value heads, G = N/K, H head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.model.attention.chunked import query_ranges
from maxlm.model.attention.decode import softmax_with_sinks
from maxlm.model.layers.softcap import softcap as capped


class TokenTree(NamedTuple):
    """Token trees of each row.

    Attributes:
        end_BT: index after the last token that attends to this one.
        depth_BT: number of ancestors of a token, which is its position in every text that contains it.
    """

    end_BT: jax.Array
    depth_BT: jax.Array


def tree_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    tree: TokenTree,
    *,
    window: int,
    softcap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q·k / sqrt(H)) · v over each token and its ancestors. Gradients are not supported.

    Args:
        q_BTNH: queries.
        k_BTKH: keys; K divides N.
        v_BTKH: values.
        tree: trees of the tokens.
        window: number of last tokens of its text to which a query attends, including itself; 0: all.
        softcap: limit of the scores; 0: none.
        sinks_N: logit of each head that joins the denominator of its softmax; None: no sinks.

    Returns:
        [B, T, N, H] in the dtype of q, with the width of the values.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * (1 / math.sqrt(H))
    k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    sinks_KG = None if sinks_N is None else sinks_N.reshape(K, N // K)
    parts = []
    # Tokens within the window of a text may be far away in the row, so ranges start at 0.
    for first, last, _ in query_ranges(T, 0):
        index_R1, index_1S = jnp.arange(first, last)[:, None], jnp.arange(last)[None, :]
        sees_BRS = (index_1S <= index_R1)[None] & (index_R1[None] < tree.end_BT[:, None, :last])
        if window:
            behind_BRS = tree.depth_BT[:, first:last, None] - tree.depth_BT[:, None, :last]
            sees_BRS &= behind_BRS < window
        scores_BKGRS = jnp.einsum(
            'BKGRH,BKSH->BKGRS',
            q_BKGTH[:, :, :, first:last],
            k_BKTH[:, :, :last],
            preferred_element_type=jnp.float32,
        )
        scores_BKGRS = capped(scores_BKGRS, softcap)
        scores_BKGRS = jnp.where(sees_BRS[:, None, None], scores_BKGRS, jnp.finfo(jnp.float32).min)
        weights_BKGRS = softmax_with_sinks(scores_BKGRS, sinks_KG).astype(q_BTNH.dtype)
        parts.append(jnp.einsum('BKGRS,BKSH->BKGRH', weights_BKGRS, v_BKTH[:, :, :last]))
    o_BKGTH = jnp.concatenate(parts, axis=3)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)
