"""Causal attention for one block of queries at a time, for devices and cases without a fused kernel.

An array of T × T scores never exists, and most masked scores are not computed. Each range of queries uses only the keys
up to its end, and with a window only the keys from the window of its first query. The backward pass recomputes
probabilities from the logarithm of their denominators (Dao et al. 2022, "FlashAttention").

Values may have another width than queries and keys; H then is either width.

Shapes: B batch, T length, S keys, R queries of a range, N query heads, K key/value heads, G = N/K, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlm.model.layers.softcap import softcap as capped

# Largest number of query ranges. More ranges would compute fewer masked scores but make the program longer.
RANGES = 8
# Smallest number of queries in a range, because products of few rows are slow.
MIN_RANGE = 128
# Number of queries whose scores exist at the same time in a longer range.
QUERY_BLOCK = 256
# Name of the forward results that the backward pass needs, for rematerialization policies.
ATTENDED = 'attended'


def attend_blockwise(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    *,
    window: int,
    softcap: float = 0.0,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q·k / sqrt(H)) · v over the keys of the query's document up to its position.

    Args:
        q_BTNH: queries.
        k_BTKH: keys; K divides N.
        v_BTKH: values.
        segments_BT: number of each token's document; None: each row is one document.
        window: number of last tokens to which a query attends, including itself; 0: all.
        softcap: limit of the scores (`maxlm.model.layers.softcap`); 0: none.
        sinks_N: logit of each head that joins the denominator of its softmax; None: no sinks.

    Returns:
        [B, T, N, H] in the dtype of q, with the width of the values.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    # Heads precede positions, because XLA has fast CPU kernels for products over the last two axes.
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    sinks_KG = None if sinks_N is None else sinks_N.reshape(K, N // K)
    limits = _Limits(window, softcap)
    o_BKGTH = _attend(q_BKGTH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), segments_BT, sinks_KG, limits)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


class QueryRange(NamedTuple):
    """Queries `first` … `last` - 1, which attend to the keys `start` … `last` - 1."""

    first: int
    last: int
    start: int


class _Limits(NamedTuple):
    """Static limits of attention: the arguments `window` and `softcap` of `attend_blockwise`."""

    window: int
    softcap: float


class _Keys(NamedTuple):
    """Keys, values and segments for a range of queries."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    segments_BS: jax.Array | None


class _Queries(NamedTuple):
    """Queries of a range or a block of it. The last three fields are None in the forward pass.

    Attributes:
        position_R: position of each query.
        q_BKGRH: queries.
        segments_BR: segments of the queries, or None.
        log_z_BKGR: logarithm of the softmax's denominator.
        gradient_BKGRH: gradient of the output.
        delta_BKGR: Σ output · gradient of the output.
    """

    position_R: jax.Array
    q_BKGRH: jax.Array
    segments_BR: jax.Array | None
    log_z_BKGR: jax.Array | None = None
    gradient_BKGRH: jax.Array | None = None
    delta_BKGR: jax.Array | None = None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q_BKGTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    segments_BT: jax.Array | None,
    sinks_KG: jax.Array | None,
    limits: _Limits,
) -> jax.Array:
    return _forward(q_BKGTH, k_BKTH, v_BKTH, segments_BT, sinks_KG, limits)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None, limits: _Limits
) -> tuple[Any, Any]:
    outputs = []
    for part in query_ranges(q.shape[3], limits.window):
        keys = _keys(part, k, v, segments)
        attend_block = partial(_block_forward, keys, part.start, limits)
        outputs.append(
            _by_blocks(lambda _, queries, f=attend_block: (None, f(queries)), None, _queries(part, q, segments))[1]
        )
    o, log_z = (jnp.concatenate(parts, axis=3) for parts in zip(*outputs, strict=True))
    if sinks is not None:
        without, log_z = log_z, jnp.logaddexp(log_z, sinks[None, :, :, None])
        o = (o * jnp.exp(without - log_z)[..., None]).astype(o.dtype)
    o, log_z = checkpoint_name(o, ATTENDED), checkpoint_name(log_z, ATTENDED)
    return o, (q, k, v, segments, sinks, o, log_z)


def _backward(limits: _Limits, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, sinks, o, log_z = residuals
    delta = (o.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    # The gradient of a score is weight · (gradient of the weight - delta), and the value of a sink is 0.
    of_sinks = None if sinks is None else -(jnp.exp(sinks[None, :, :, None] - log_z) * delta).sum((0, 3))
    q_gradients = []
    of_keys, of_values = [], []
    for part in query_ranges(q.shape[3], limits.window):
        keys = _keys(part, k, v, segments)
        queries = _queries(part, q, segments, log_z, gradient, delta)
        zeros = (jnp.zeros(keys.k_BKSH.shape, jnp.float32), jnp.zeros(keys.v_BKSH.shape, jnp.float32))
        sums, q_gradient = _by_blocks(partial(_block_backward, keys, part.start, limits), zeros, queries)
        q_gradients.append(q_gradient)
        # A sum of padded arrays is one loop. Adding to a slice would be a scatter, which is sequential on CPUs.
        rest = [(0, 0), (0, 0), (part.start, k.shape[2] - part.last), (0, 0)]
        of_keys.append(jnp.pad(sums[0], rest))
        of_values.append(jnp.pad(sums[1], rest))
    k_gradient, v_gradient = sum(of_keys[1:], of_keys[0]), sum(of_values[1:], of_values[0])
    return jnp.concatenate(q_gradients, axis=3), k_gradient.astype(k.dtype), v_gradient.astype(v.dtype), None, of_sinks


_attend.defvjp(_forward, _backward)


def query_ranges(length: int, window: int) -> Iterator[QueryRange]:
    """Yields the query ranges of a sequence in order; `window` is that of `attend_blockwise`."""
    size = max(MIN_RANGE, -(-length // RANGES))
    if size > QUERY_BLOCK:
        size = -(-size // QUERY_BLOCK) * QUERY_BLOCK
    for first in range(0, length, size):
        yield QueryRange(first, min(first + size, length), max(0, first - window + 1) if window else 0)


def _keys(part: QueryRange, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> _Keys:
    seen = slice(part.start, part.last)
    return _Keys(k[:, :, seen], v[:, :, seen], None if segments is None else segments[:, seen])


def _queries(part: QueryRange, q: jax.Array, segments: jax.Array | None, *of_backward: jax.Array) -> _Queries:
    own = slice(part.first, part.last)
    rest = (x[:, :, :, own] for x in of_backward)
    return _Queries(
        jnp.arange(part.first, part.last), q[:, :, :, own], None if segments is None else segments[:, own], *rest
    )


def _by_blocks(run: Any, carry: Any, queries: _Queries) -> tuple[Any, Any]:
    """Scans `run(carry, queries) → (carry, arrays [B, K, G, R, …])` over blocks of queries.

    If the number of queries does not divide into blocks, `run` is called once with all queries.
    """
    R = len(queries.position_R)
    if R <= QUERY_BLOCK or R % QUERY_BLOCK:
        return run(carry, queries)

    def split(x: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, QUERY_BLOCK, *x.shape[axis + 1 :]), axis, 0)

    axes = _Queries(0, 3, 1, 3, 3, 3)  # type: ignore[arg-type]
    blocks = _Queries(*(None if x is None else split(x, axis) for x, axis in zip(queries, axes, strict=True)))  # type: ignore[arg-type]
    carry, outputs = jax.lax.scan(run, carry, blocks)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], R, *x.shape[5:])

    return carry, jax.tree.map(join, outputs)


def _scores(queries: _Queries, keys: _Keys, start: int, limits: _Limits) -> jax.Array:
    """Returns capped q·k / sqrt(H), float32 [B, K, G, R, S]; masked scores are the smallest finite value."""
    # Scores and softmax are float32, because the 8 bits of bfloat16 are too few for a sum over thousands of keys.
    scale = 1 / math.sqrt(queries.q_BKGRH.shape[-1])
    q, k = queries.q_BKGRH, keys.k_BKSH
    scores = scale * jnp.einsum('BKGRH,BKSH->BKGRS', q, k, preferred_element_type=jnp.float32)
    scores, window = capped(scores, limits.softcap), limits.window
    behind_RS = queries.position_R[:, None] - (start + jnp.arange(k.shape[2]))[None, :]
    sees = (behind_RS >= 0) & (behind_RS < window) if window else behind_RS >= 0
    if queries.segments_BR is not None and keys.segments_BS is not None:
        sees = sees[None] & (queries.segments_BR[:, :, None] == keys.segments_BS[:, None, :])
        sees = sees[:, None, None]
    return jnp.where(sees, scores, jnp.finfo(jnp.float32).min)


def _block_forward(keys: _Keys, start: int, limits: _Limits, queries: _Queries) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a block, and the logarithm of the softmax's denominators."""
    scores = _scores(queries, keys, start, limits)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    z = weights.sum(-1, keepdims=True)
    v = keys.v_BKSH
    output = jnp.einsum('BKGRS,BKSH->BKGRH', weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (output * (1 / z)).astype(v.dtype), (largest + jnp.log(z))[..., 0]


def _block_backward(
    keys: _Keys, start: int, limits: _Limits, sums: tuple[jax.Array, jax.Array], queries: _Queries
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Adds the gradients of a block's keys and values to `sums`, and returns `sums` and the gradient of its queries."""
    q, gradient = queries.q_BKGRH, queries.gradient_BKGRH
    assert queries.log_z_BKGR is not None
    assert queries.delta_BKGR is not None
    assert gradient is not None
    scores = _scores(queries, keys, start, limits)
    weights = jnp.exp(scores - queries.log_z_BKGR[..., None])
    by_weight = jnp.einsum('BKGRH,BKSH->BKGRS', gradient, keys.v_BKSH, preferred_element_type=jnp.float32)
    by_score = weights * (by_weight - queries.delta_BKGR[..., None]) * (1 / math.sqrt(q.shape[-1]))
    if limits.softcap:
        # The derivative of cap · tanh(x / cap). Masked scores are far below -cap.
        by_score *= 1 - jnp.square(jnp.maximum(scores / limits.softcap, -1))
    weights, by_score = weights.astype(q.dtype), by_score.astype(q.dtype)
    by_query = jnp.einsum('BKGRS,BKSH->BKGRH', by_score, keys.k_BKSH)

    by_key, by_value = _over_queries(q, by_score), _over_queries(gradient, weights)
    return (sums[0] + by_key, sums[1] + by_value), by_query


def _over_queries(x_BKGRH: jax.Array, y_BKGRS: jax.Array) -> jax.Array:
    """Returns the products of x and y, summed over queries, float32 [B, K, S, H]."""
    x_BKHQ = x_BKGRH.reshape(*x_BKGRH.shape[:2], -1, x_BKGRH.shape[-1]).swapaxes(2, 3)
    y_BKQS = y_BKGRS.reshape(*y_BKGRS.shape[:2], -1, y_BKGRS.shape[-1])
    # The barriers keep the transposes on the smaller arrays. Without them XLA transposes the large array, and has no
    # fast CPU kernel for the product.
    x_BKHQ = jax.lax.optimization_barrier(x_BKHQ)
    sum_BKHS = jax.lax.optimization_barrier(jnp.einsum('BKHQ,BKQS->BKHS', x_BKHQ, y_BKQS))
    return sum_BKHS.swapaxes(2, 3).astype(jnp.float32)
