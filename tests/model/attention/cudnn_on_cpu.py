"""cuDNN's kernels for lists of documents as formulas, with NaN at positions that the kernels do not write."""

import math

import jax.numpy as jnp


def run_forward(q_BTNH, k_BSKH, v_BSKH, start_C1, *, window):
    """Replaces `maxlm.model.attention.cudnn.run_forward`."""
    q, k, v = _by_document(start_C1, q_BTNH, k_BSKH, v_BSKH)
    scores_CNTS, is_inside_CT = _scores(q, k, start_C1, window)
    largest_CNT = scores_CNTS.max(-1)
    weights_CNTS = jnp.exp(scores_CNTS - largest_CNT[..., None])
    total_CNT = weights_CNTS.sum(-1)
    statistics_CNT = jnp.where(is_inside_CT[:, None], largest_CNT + jnp.log(total_CNT), jnp.nan)
    o_CTNH = jnp.einsum('CNTS,CSNH->CTNH', weights_CNTS / total_CNT[..., None], v)
    return _in_rows(o_CTNH, start_C1, q_BTNH), statistics_CNT


def run_backward(q_BTNH, k_BSKH, v_BSKH, statistics_CNT, do_BTNH, o_BTNH, start_C1, *, window):
    """Replaces `maxlm.model.attention.cudnn.run_backward`."""
    q, k, v, do, o = _by_document(start_C1, q_BTNH, k_BSKH, v_BSKH, do_BTNH, o_BTNH)
    scores_CNTS, is_inside_CT = _scores(q, k, start_C1, window)
    is_inside_C1T1 = is_inside_CT[:, None, :, None]
    weights_CNTS = jnp.where(is_inside_C1T1, jnp.exp(scores_CNTS - statistics_CNT[..., None]), 0)
    do, o = (jnp.where(is_inside_CT[:, :, None, None], x, 0) for x in (do, o))
    inner_CNT = jnp.einsum('CTNH,CTNH->CNT', do, o)
    d_CNTS = weights_CNTS * (jnp.einsum('CTNH,CSNH->CNTS', do, v) - inner_CNT[..., None]) / math.sqrt(q.shape[-1])
    K = k_BSKH.shape[2]
    dk = jnp.einsum('CNTS,CTNH->CSNH', d_CNTS, q)
    dv = jnp.einsum('CNTS,CTNH->CSNH', weights_CNTS, do)
    # Gradients are summed over the query heads of a group.
    dk, dv = (x.reshape(*x.shape[:2], K, -1, x.shape[-1]).sum(3) for x in (dk, dv))
    dq = jnp.einsum('CNTS,CSNH->CTNH', d_CNTS, k)
    return tuple(_in_rows(x, start_C1, like) for x, like in ((dq, q_BTNH), (dk, k_BSKH), (dv, v_BSKH)))


def _tokens(start_C1, length):
    """Returns, for each document, the token indices from its start on, and a mask of tokens that belong to it."""
    places_1T = jnp.arange(length)[None, :]
    return start_C1[:-1, None] + places_1T, places_1T < jnp.diff(start_C1)[:, None]


def _by_document(start_C1, *arrays):
    B, T, N, H = arrays[0].shape
    token_CT, _ = _tokens(start_C1, T)
    token_CT = jnp.minimum(token_CT, B * T - 1)
    return [jnp.repeat(x.reshape(B * T, -1, H)[token_CT], N // x.shape[2], axis=2) for x in arrays]


def _scores(q, k, start_C1, window):
    T, H = q.shape[1], q.shape[-1]
    _, is_inside_CT = _tokens(start_C1, T)
    behind_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    is_seen_TS = (behind_TS >= 0) & (behind_TS < (window or T))
    is_seen_CNTS = is_seen_TS[None, None] & is_inside_CT[:, None, None, :]
    return jnp.where(is_seen_CNTS, jnp.einsum('CTNH,CSNH->CNTS', q, k) / math.sqrt(H), -1e30), is_inside_CT


def _in_rows(x_CTNH, start_C1, like):
    B, T, heads, H = like.shape
    token_CT, is_inside_CT = _tokens(start_C1, T)
    rows = jnp.full((B * T, heads, H), jnp.nan, x_CTNH.dtype)
    return rows.at[jnp.where(is_inside_CT, token_CT, B * T)].set(x_CTNH, mode='drop').reshape(like.shape)
