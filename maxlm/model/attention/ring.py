"""Ring attention: causal self-attention over a sequence that is sharded over devices.

Devices pass keys and values around a ring (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-
Infinite Context"). The backward pass uses the formula of FlashAttention-2 (Dao 2023). Zigzag order balances the work.

Zigzag over R devices splits the sequence into 2R chunks, and device i has the chunks i and 2R - 1 - i. For R = 4:

    device    0     1     2     3
    chunks   0 7   1 6   2 5   3 4

A chunk of queries attends to all earlier chunks of keys completely, to itself by half, and to no later chunk. Every
device i therefore computes i + (2R - 1 - i) = 2R - 1 complete chunks and two halves. In sequence order the first device
would compute one complete chunk and the last device 4R - 3, and a ring is as slow as its slowest device.

Shapes, per device: B batch, T positions (R · T in total), N query heads, K key/value heads, G = N/K, H head dim,
U the two chunks, C = T/2 positions of a chunk, X blocks of queries, Q queries of a block, Z keys and values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar('Tree')

# Number of queries of a chunk whose scores exist at the same time.
QUERY_BLOCK = 256
# log Σ exp(score) of a row without keys. It is finite, unlike log 0, so differences are never NaN.
NOTHING = float(np.finfo(np.float32).min)


def zigzag(length: int, devices: int) -> np.ndarray:
    """Returns the zigzag order of a sequence over a ring: the original index of each position in the new order.

    `x[:, zigzag(length, devices)]`, split into equal parts, gives each device its two chunks. Indexing with
    `np.argsort` of the order restores the sequence order.

    Raises:
        ValueError: the length does not divide into two chunks for each device.
    """
    if length % (2 * devices):
        raise ValueError(f'length={length} must be a multiple of {2 * devices} (two chunks per device)')
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[devices:][::-1]], axis=1).reshape(-1)


def ring_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    *,
    axis: str,
    window: int,
) -> jax.Array:
    """Computes softmax(q·k / sqrt(H)) · v of this device's queries over the keys of all devices along a mesh axis.

    It must be called inside of `jax.shard_map`, with the sequence in `zigzag` order along `axis`. Devices send only to
    their neighbor, and send the next keys while they compute with the current ones. Pairs of chunks that are completely
    masked by causality or by the window are not computed.

    Args:
        q_BTNH: queries of this device.
        k_BTKH, v_BTKH: keys and values; K divides N.
        segments_BT: number of each token's document; tokens attend only to their own document. None: one document.
        axis: mesh axis over which the sequence is sharded.
        window: number of last tokens to which a query attends, including itself; 0: all.

    Returns:
        [B, T, N, H] in the dtype of q.
    """
    assert q_BTNH.shape[1] % 2 == 0, f'{q_BTNH.shape[1]} positions are not two chunks'
    return _ring_attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, axis, window)


class _Pair(NamedTuple):
    """A chunk of queries and a chunk of keys, by index on the device (half) and in the sequence (chunk)."""

    query_half: jax.Array | int
    key_half: jax.Array | int
    query_chunk: jax.Array
    key_chunk: jax.Array
    # The same chunk twice, the only pair that causality masks partially.
    diagonal: bool


class _Travelling(NamedTuple):
    """Arrays that are passed around the ring. Keys and values are one array, so one exchange suffices."""

    kv_UZBKCH: jax.Array
    segments_UBC: jax.Array | None


class _Queries(NamedTuple):
    """A chunk of queries or a block of a chunk."""

    q_BKGCH: jax.Array
    positions_C: jax.Array
    segments_BC: jax.Array | None


class _Keys(NamedTuple):
    kv_ZBKCH: jax.Array
    positions_C: jax.Array
    segments_BC: jax.Array | None


class _Seen(NamedTuple):
    """Partial attention over the keys so far: output and log Σ exp(score)."""

    o_BKGCH: jax.Array
    logsumexp_BKGC: jax.Array


class _Saved(NamedTuple):
    """Residuals for the backward pass, which recomputes the scores."""

    q_BTNH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    segments_BT: jax.Array | None
    o_BTNH: jax.Array
    logsumexp_UBKGC: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None, axis: str, window: int
) -> jax.Array:
    return _forward(q_BTNH, k_BTKH, v_BTKH, segments_BT, axis, window)[0]


def _forward(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None, axis: str, window: int
) -> tuple[jax.Array, _Saved]:
    devices = jax.lax.axis_size(axis)
    q_UBKGCH = _chunks(q_BTNH, k_BTKH.shape[2])
    own = _travelling(k_BTKH, v_BTKH, segments_BT)

    def add(seen: _Seen, arrived: _Travelling, pairs: list[_Pair]) -> _Seen:
        for pair in pairs:
            queries, keys = _operands(pair, q_UBKGCH, own.segments_UBC, arrived)
            look = functools.partial(_see, queries=queries, keys=keys, diagonal=pair.diagonal, window=window)
            before = _half(seen, pair.query_half)
            after = _if_in_sight(pair, window, queries, keys, look, lambda before: before, before)
            seen = _with_half(seen, after, pair.query_half)
        return seen

    def turn(step: jax.Array, carry: tuple[_Travelling, _Seen]) -> tuple[_Travelling, _Seen]:
        arrived, seen = carry
        return _send(arrived, axis), add(seen, arrived, _pairs(step, axis))

    seen = _Seen(jnp.zeros_like(q_UBKGCH, jnp.float32), jnp.full_like(q_UBKGCH[..., 0], NOTHING, jnp.float32))
    if devices == 1:
        seen = add(seen, own, _own_pairs(axis))
    else:
        # A loop, because the exchanges of unrolled steps would all start at once and need memory for all keys.
        carry = (_send(own, axis), add(seen, own, _own_pairs(axis)))
        arrived, seen = jax.lax.fori_loop(1, devices - 1, turn, carry)
        seen = add(seen, arrived, _pairs(devices - 1, axis))
    o_BTNH = _unchunks(seen.o_BKGCH).astype(q_BTNH.dtype)
    return o_BTNH, _Saved(q_BTNH, k_BTKH, v_BTKH, segments_BT, o_BTNH, seen.logsumexp_BKGC)


def _backward(
    axis: str, window: int, saved: _Saved, do_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    devices, K = jax.lax.axis_size(axis), saved.k_BTKH.shape[2]
    q_UBKGCH, do_UBKGCH = _chunks(saved.q_BTNH, K), _chunks(do_BTNH, K)
    own = _travelling(saved.k_BTKH, saved.v_BTKH, saved.segments_BT)
    # Σ over keys of weight · gradient of the weight, which is the same for every pair of chunks.
    o_UBKGCH = _chunks(saved.o_BTNH, K)
    delta_UBKGC = jnp.sum(do_UBKGCH.astype(jnp.float32) * o_UBKGCH.astype(jnp.float32), axis=-1)
    after_U = (do_UBKGCH, saved.logsumexp_UBKGC, delta_UBKGC)

    def add(
        dq_UBKGCH: jax.Array, dkv_UZBKCH: jax.Array, arrived: _Travelling, pairs: list[_Pair]
    ) -> tuple[jax.Array, jax.Array]:
        for pair in pairs:
            queries, keys = _operands(pair, q_UBKGCH, own.segments_UBC, arrived)
            after = _half(after_U, pair.query_half)
            look = functools.partial(_gradients, queries=queries, keys=keys, diagonal=pair.diagonal, window=window)
            zeros = functools.partial(_no_gradients, queries=queries, keys=keys)
            dq_BKGCH, dkv_ZBKCH = _if_in_sight(pair, window, queries, keys, look, zeros, after)
            dq_UBKGCH = _with_half(dq_UBKGCH, _half(dq_UBKGCH, pair.query_half) + dq_BKGCH, pair.query_half)
            dkv_UZBKCH = _with_half(dkv_UZBKCH, _half(dkv_UZBKCH, pair.key_half) + dkv_ZBKCH, pair.key_half)
        return dq_UBKGCH, dkv_UZBKCH

    def turn(step: jax.Array, carry: tuple[_Travelling, jax.Array, jax.Array]) -> Any:
        arrived, dq_UBKGCH, dkv_UZBKCH = carry
        # The gradient of the keys is sent with them, while this step's contribution is computed, which is added later.
        return _send(arrived, axis), *add(dq_UBKGCH, _send(dkv_UZBKCH, axis), arrived, _pairs(step, axis))

    dq_UBKGCH = jnp.zeros_like(q_UBKGCH, jnp.float32)
    dkv_UZBKCH = jnp.zeros_like(own.kv_UZBKCH, jnp.float32)
    dq_UBKGCH, dkv_UZBKCH = add(dq_UBKGCH, dkv_UZBKCH, own, _own_pairs(axis))
    if devices > 1:
        carry = (_send(own, axis), dq_UBKGCH, dkv_UZBKCH)
        arrived, dq_UBKGCH, dkv_UZBKCH = jax.lax.fori_loop(1, devices - 1, turn, carry)
        pairs = _pairs(devices - 1, axis)
        dq_UBKGCH, dkv_UZBKCH = add(dq_UBKGCH, _send(dkv_UZBKCH, axis), arrived, pairs)
        # The last exchange returns the gradients to the device of their keys.
        dkv_UZBKCH = _send(dkv_UZBKCH, axis)
    dq_BTNH = _unchunks(dq_UBKGCH).astype(saved.q_BTNH.dtype)
    dk_BTKH = _unchunks(dkv_UZBKCH[:, 0, :, :, None]).astype(saved.k_BTKH.dtype)
    dv_BTKH = _unchunks(dkv_UZBKCH[:, 1, :, :, None]).astype(saved.v_BTKH.dtype)
    return dq_BTNH, dk_BTKH, dv_BTKH, None


_ring_attention.defvjp(_forward, _backward)


def _own_pairs(axis: str) -> list[_Pair]:
    """Returns the pairs of chunks that causality does not mask, for the device's own keys."""
    early = jax.lax.axis_index(axis)
    late = 2 * jax.lax.axis_size(axis) - 1 - early
    return [
        _Pair(0, 0, early, early, diagonal=True),
        _Pair(1, 0, late, early, diagonal=False),
        _Pair(1, 1, late, late, diagonal=True),
    ]


def _pairs(step: jax.Array | int, axis: str) -> list[_Pair]:
    """Returns the pairs of chunks that causality does not mask, for keys of the device `step` > 0 positions before."""
    devices = jax.lax.axis_size(axis)
    here = jax.lax.axis_index(axis)
    source = (here - step) % devices
    last = 2 * devices - 1
    # For two devices, causality allows either the pair of early chunks or the pair of late chunks.
    earlier = source < here
    half = jnp.where(earlier, 0, 1)
    query_chunk, key_chunk = jnp.where(earlier, here, last - here), jnp.where(earlier, source, last - source)
    return [
        # A late chunk of queries follows the early chunks of keys of all devices.
        _Pair(1, 0, last - here, source, diagonal=False),
        _Pair(half, half, query_chunk, key_chunk, diagonal=False),
    ]


def _send(x: Tree, axis: str) -> Tree:
    """Sends x to the next device of the ring and returns the value from the previous device."""
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(device, (device + 1) % devices) for device in range(devices)])


def _operands(
    pair: _Pair, q_UBKGCH: jax.Array, segments_UBC: jax.Array | None, arrived: _Travelling
) -> tuple[_Queries, _Keys]:
    C = q_UBKGCH.shape[4]
    q_BKGCH, query_segments_BC = _half((q_UBKGCH, segments_UBC), pair.query_half)
    kv_ZBKCH, key_segments_BC = _half((arrived.kv_UZBKCH, arrived.segments_UBC), pair.key_half)
    within_C = jnp.arange(C)
    return (
        _Queries(q_BKGCH, pair.query_chunk * C + within_C, query_segments_BC),
        _Keys(kv_ZBKCH, pair.key_chunk * C + within_C, key_segments_BC),
    )


def _if_in_sight(
    pair: _Pair, window: int, queries: _Queries, keys: _Keys, look: Callable, otherwise: Callable, x: Any
) -> Any:
    """Returns `look(x)` if a query of the pair can have a key in its window, otherwise `otherwise(x)`."""
    if not window or pair.diagonal:
        return look(x)
    return jax.lax.cond(queries.positions_C[0] - keys.positions_C[-1] < window, look, otherwise, x)


def _see(before: _Seen, *, queries: _Queries, keys: _Keys, diagonal: bool, window: int) -> _Seen:
    """Adds the attention of a chunk of queries to a chunk of keys."""
    v_BKCH = keys.kv_ZBKCH[1]

    def see_block(block: tuple[_Queries, _Seen]) -> _Seen:
        queries, before = block
        scores_BKGQC, mask_B11QC = _scores(queries, keys, diagonal, window)
        highest_BKGQ1 = scores_BKGQC.max(axis=-1, keepdims=True)
        weights_BKGQC = _masked(jnp.exp(scores_BKGQC - highest_BKGQ1), mask_B11QC)
        o_BKGQH = _product('BKGQC,BKCH->BKGQH', weights_BKGQC.astype(v_BKCH.dtype), v_BKCH)
        # A completely masked row has log 0 = -inf, which adds nothing to the finite previous value.
        highest_BKGQ = highest_BKGQ1[..., 0]
        logsumexp_BKGQ = jnp.logaddexp(before.logsumexp_BKGC, highest_BKGQ + jnp.log(weights_BKGQC.sum(axis=-1)))
        keep_BKGQ1 = jnp.exp(before.logsumexp_BKGC - logsumexp_BKGQ)[..., None]
        add_BKGQ1 = jnp.exp(highest_BKGQ - logsumexp_BKGQ)[..., None]
        return _Seen(before.o_BKGCH * keep_BKGQ1 + o_BKGQH * add_BKGQ1, logsumexp_BKGQ)

    after = jax.lax.map(see_block, (_query_blocks(queries), jax.tree.map(_blocks, before)))
    return jax.tree.map(_unblocks, after)


def _gradients(
    after: tuple[jax.Array, jax.Array, jax.Array], *, queries: _Queries, keys: _Keys, diagonal: bool, window: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the contribution of a pair to the gradients of its queries and of its keys and values.

    `after` contains the gradient of the output, log Σ exp(score) and delta of the queries.
    """
    k_BKCH, v_BKCH = keys.kv_ZBKCH
    scale = 1 / math.sqrt(k_BKCH.shape[-1])

    def block_gradients(dkv_ZBKCH: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        queries, (do_BKGQH, logsumexp_BKGQ, delta_BKGQ) = block
        scores_BKGQC, mask_B11QC = _scores(queries, keys, diagonal, window)
        weights_BKGQC = _masked(jnp.exp(scores_BKGQC - logsumexp_BKGQ[..., None]), mask_B11QC)
        dweights_BKGQC = _product('BKGQH,BKCH->BKGQC', do_BKGQH, v_BKCH)
        dscores_BKGQC = (weights_BKGQC * (dweights_BKGQC - delta_BKGQ[..., None]) * scale).astype(k_BKCH.dtype)
        dq_BKGQH = _product('BKGQC,BKCH->BKGQH', dscores_BKGQC, k_BKCH)
        dk_BKCH = _product('BKGQC,BKGQH->BKCH', dscores_BKGQC, queries.q_BKGCH)
        dv_BKCH = _product('BKGQC,BKGQH->BKCH', weights_BKGQC.astype(v_BKCH.dtype), do_BKGQH)
        return dkv_ZBKCH + jnp.stack([dk_BKCH, dv_BKCH]), dq_BKGQH

    dkv_ZBKCH = jnp.zeros_like(keys.kv_ZBKCH, jnp.float32)
    blocks = (_query_blocks(queries), jax.tree.map(_blocks, after))
    dkv_ZBKCH, dq_XBKGQH = jax.lax.scan(block_gradients, dkv_ZBKCH, blocks)
    return _unblocks(dq_XBKGQH), dkv_ZBKCH


def _no_gradients(_: Any, *, queries: _Queries, keys: _Keys) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(queries.q_BKGCH, jnp.float32), jnp.zeros_like(keys.kv_ZBKCH, jnp.float32)


def _scores(queries: _Queries, keys: _Keys, diagonal: bool, window: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores [B, K, G, Q, C] in float32, and their mask; None if no score is masked."""
    scores_BKGQC = _product('BKGQH,BKCH->BKGQC', queries.q_BKGCH, keys.kv_ZBKCH[0])
    scores_BKGQC *= 1 / math.sqrt(queries.q_BKGCH.shape[-1])
    behind_QC = queries.positions_C[:, None] - keys.positions_C[None, :]
    masks = []
    if diagonal:
        masks.append((behind_QC >= 0)[None])
    if window:
        masks.append((behind_QC < window)[None])
    if queries.segments_BC is not None and keys.segments_BC is not None:
        masks.append(queries.segments_BC[:, :, None] == keys.segments_BC[:, None, :])
    if not masks:
        return scores_BKGQC, None
    mask_B11QC = functools.reduce(jnp.logical_and, masks)[:, None, None]
    return jnp.where(mask_B11QC, scores_BKGQC, NOTHING), mask_B11QC


def _masked(weights_BKGQC: jax.Array, mask_B11QC: jax.Array | None) -> jax.Array:
    """Sets masked weights to 0, which matters in completely masked rows, where all scores are equal."""
    return weights_BKGQC if mask_B11QC is None else jnp.where(mask_B11QC, weights_BKGQC, 0)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes an einsum with float32 sums; the 8 bits of bfloat16 are too few for a sum over thousands of keys."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _chunks(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Reshapes [B, T, N, H] to [U, B, K, G, C, H]. XLA has fast CPU kernels for heads before positions."""
    B, T, N, H = x_BTNH.shape
    x_BUCKGH = x_BTNH.reshape(B, 2, T // 2, num_kv_heads, N // num_kv_heads, H)
    return x_BUCKGH.transpose(1, 0, 3, 4, 2, 5)


def _unchunks(x_UBKGCH: jax.Array) -> jax.Array:
    U, B, K, G, C, H = x_UBKGCH.shape
    return x_UBKGCH.transpose(1, 0, 4, 2, 3, 5).reshape(B, U * C, K * G, H)


def _travelling(k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None) -> _Travelling:
    K = k_BTKH.shape[2]
    kv_UZBKCH = jnp.stack([_chunks(k_BTKH, K)[:, :, :, 0], _chunks(v_BTKH, K)[:, :, :, 0]], axis=1)
    segments_UBC = None if segments_BT is None else segments_BT.reshape(segments_BT.shape[0], 2, -1).swapaxes(0, 1)
    return _Travelling(kv_UZBKCH, segments_UBC)


def _half(x: Tree, half: jax.Array | int) -> Tree:
    """Returns one of the two chunks of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, half, keepdims=False), x)


def _with_half(x: Tree, chunk: Tree, half: jax.Array | int) -> Tree:
    return jax.tree.map(lambda x, chunk: jax.lax.dynamic_update_index_in_dim(x, chunk, half, 0), x, chunk)


def _query_blocks(queries: _Queries) -> _Queries:
    q_BKGCH, positions_C, segments_BC = queries
    segments_XBQ = None if segments_BC is None else _blocks(segments_BC, axis=1)
    return _Queries(_blocks(q_BKGCH), _blocks(positions_C, axis=0), segments_XBQ)


def _blocks(x: jax.Array, axis: int = 3) -> jax.Array:
    """Splits an axis of C into a leading axis of X blocks and an axis of Q; one block if C does not divide."""
    C = x.shape[axis]
    size = C if C % QUERY_BLOCK else QUERY_BLOCK
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _unblocks(x: jax.Array) -> jax.Array:
    """Joins [X, B, K, G, Q, ...] to [B, K, G, C, ...], the inverse of `_blocks`."""
    X, B, K, G, Q, *rest = x.shape
    return jnp.moveaxis(x, 0, 3).reshape(B, K, G, X * Q, *rest)
