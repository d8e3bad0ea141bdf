"""Attention within packed documents by cuDNN, which is told where they begin and needs no mask.

With a mask cuDNN computes every score and adds an array of [B, T, S] to them. Told of the documents it skips what lies
between them, as it skips the future. It wants a list of all documents of all rows on a device, of a length that the
program fixes. A device that has more of them than fit into one list runs the kernel once for each list.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim, M documents for which
there is room per row, C = B·M length of a list, X = T+M+1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from maxlm.parallel.partitioning import Partitioning

# A list has room for documents of so many tokens each, but not for more per row than the second number: cuDNN keeps a
# row of T float32 per head for every place in it while it runs.
TOKENS_PER_DOCUMENT = 64
MAX_DOCUMENTS = 64
# In the names of a program's operations, the loop over lists behind the first, of which nearly always there are none.
MORE_LISTS = 'more_lists_of_documents'
# As cuDNN orders the axes of what it returns; in memory heads stay inside of positions, as they are in q.
OUTPUT_LAYOUT = (0, 2, 1, 3)


class Documents(NamedTuple):
    """The documents of the rows on one device, numbered through from the first row's first. Of int32."""

    # Of each token the number of its document.
    number_BT: jax.Array
    # By number, over all rows: how many tokens lie before the document's first; B·T behind the last document.
    start_BX: jax.Array


def supports_documents(q_BTNH: jax.Array, placement: Partitioning) -> bool:
    """Whether cuDNN can be told of the documents of rows with these queries.

    It can on Hopper and later, be it the GPU that is here or the one that a program is compiled for; not in a pipeline,
    whose stages are a vmap.
    """
    if placement.num_shards('layers') > 1:
        return False
    # Private, but what JAX's own attention asks, and so what `maxlm.planning.gpu_targets` answers for other machines.
    from jax._src.cudnn import fused_attention_stablehlo

    on_device = q_BTNH.size // (placement.num_shards('batch') * placement.num_shards('heads'))
    # Where a document begins is told in elements, as an int32.
    return on_device < 2**31 and fused_attention_stablehlo.check_compute_capability('9.0')


def attend_documents(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    *,
    window: int,
    placement: Partitioning,
) -> jax.Array:
    """Causal attention in which tokens see their own document only.

    Args:
        q_BTNH: queries, in bfloat16 or float16; k_BSKH, v_BSKH: keys and values, K dividing N.
        segments_BT: a document is a run of equal numbers in a row. Padding is one too, so that its output is finite.
        window: the number of last tokens that a query sees, its own included; 0: all.
        placement: every device works on its own rows and heads.

    Returns:
        [B, T, N, H] in q's type.
    """

    def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *_: str) -> jax.Array:
        return _attend(q, k, v, list_documents(segments), window)

    if placement.num_shards('batch') * placement.num_shards('heads') > 1:
        rows = ('batch', 'length')
        heads, kv_heads = (*rows, 'heads', 'head_dim'), (*rows, 'kv_heads', 'head_dim')
        # The kernel's list is one device's own, which no rule for splitting the whole kernel could express.
        attend_shard = placement.per_shard(attend_shard, [heads, kv_heads, kv_heads, rows], heads, 'heads')
    return attend_shard(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def list_documents(segments_BT: jax.Array) -> Documents:
    """The runs of equal numbers in rows that are on one device."""
    B, T = segments_BT.shape
    is_first_BT = jnp.ones((B, T), bool).at[:, 1:].set(segments_BT[:, 1:] != segments_BT[:, :-1])
    is_first = is_first_BT.reshape(-1)
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    start = jnp.full(B * (T + documents_per_row(T) + 1), B * T, jnp.int32)
    # Other tokens go nowhere.
    start = start.at[jnp.where(is_first, number, start.size)].set(jnp.arange(B * T, dtype=jnp.int32), mode='drop')
    return Documents(number.reshape(B, T), start.reshape(B, -1))


def documents_per_row(length: int) -> int:
    """M: documents per row for which there is room in one run of the kernel. cuDNN takes a list from 2 on."""
    return max(2, min(length // TOKENS_PER_DOCUMENT, MAX_DOCUMENTS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, documents: Documents, window: int) -> jax.Array:
    return _forward_p.bind(q_BTNH, k_BSKH, v_BSKH, *documents, window=window)[0]


def _attend_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, documents: Documents, window: int
) -> tuple[jax.Array, Any]:
    o_BTNH, statistics_BTN = _forward_p.bind(q_BTNH, k_BSKH, v_BSKH, *documents, window=window)
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, documents, o_BTNH, statistics_BTN)


def _attend_backward(window: int, kept: Any, do_BTNH: jax.Array) -> tuple[jax.Array | None, ...]:
    q_BTNH, k_BSKH, v_BSKH, documents, o_BTNH, statistics_BTN = kept
    B, T = documents.number_BT.shape
    statistics = statistics_BTN.reshape(B * T, -1)

    def run(listed: _List) -> tuple[jax.Array, ...]:
        # What lies behind a document's end is not read.
        token_CT = jnp.minimum(listed.start_C1[:-1, None] + jnp.arange(T)[None, :], B * T - 1)
        statistics_CNT = statistics[token_CT].swapaxes(1, 2)
        return run_backward(q_BTNH, k_BSKH, v_BSKH, statistics_CNT, do_BTNH, o_BTNH, listed.start_C1, window=window)

    return *_for_all_documents(run, documents), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, number_BT: jax.Array, start_BX: jax.Array, *, window: int
) -> tuple[jax.Array, ...]:
    documents = Documents(number_BT, start_BX)
    B, T = number_BT.shape
    token_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)

    def run(listed: _List) -> tuple[jax.Array, ...]:
        o_BTNH, statistics_CNT = run_forward(q_BTNH, k_BSKH, v_BSKH, listed.start_C1, window=window)
        # cuDNN's statistics are those of a list. One for each token takes a share of that, and knows no lists.
        place_BT = jnp.clip(number_BT - listed.first, 0, B * documents_per_row(T) - 1)
        within_BT = jnp.clip(token_BT - listed.start_C1[place_BT], 0, T - 1)
        return o_BTNH, statistics_CNT[place_BT, :, within_BT]

    return _for_all_documents(run, documents)


class _List(NamedTuple):
    """Consecutive documents that the kernel is run for."""

    # The number of the first.
    first: jax.Array
    # Of each, and of the one after: tokens on the device before its first.
    start_C1: jax.Array


def _for_all_documents(run: Callable[[_List], tuple[jax.Array, ...]], documents: Documents) -> tuple[jax.Array, ...]:
    """What `run` gives, arrays [B, T, …] of which only the places of the documents given to it count, for all of them.

    Nearly always all are in the first list. Whether they are is asked on the device: no number of documents is wrong.
    """
    B, T = documents.number_BT.shape
    C = B * documents_per_row(T)

    def run_list(number: jax.Array | int) -> tuple[jax.Array, ...]:
        first = jnp.int32(number * C)
        return run(_List(first, jax.lax.dynamic_slice_in_dim(documents.start_BX.reshape(-1), first, C + 1)))

    def add_list(carry: tuple[jax.Array, tuple[jax.Array, ...]]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        number, results = carry
        is_listed_BT = documents.number_BT // C == number

        def choose(result: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(is_listed_BT.reshape(B, T, *(1,) * (new.ndim - 2)), new, result)

        return number + 1, tuple(map(choose, results, run_list(number)))

    last = documents.number_BT[-1, -1]
    results = run_list(0)
    # Not a condition around it: XLA would copy the results where there is nothing to add.
    with jax.named_scope(MORE_LISTS):
        return jax.lax.while_loop(lambda carry: carry[0] * C <= last, add_list, (jnp.int32(1), results))[1]


def _forward_shapes(
    q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, number_BT: Any, start_BX: Any, *, window: int
) -> tuple[Any, ...]:
    return q_BTNH, jax.core.ShapedArray(q_BTNH.shape[:3], jnp.float32)


# A primitive of its own, since rules on what the backward pass keeps see primitives only: those in `rematerialize` know
# this one by its name, and keep what it returns. In the parts of it they would keep statistics by list.
_forward_p = Primitive('documents_dot_product_attention_fwd')
_forward_p.multiple_results = True
_forward_p.def_impl(_forward)
_forward_p.def_abstract_eval(_forward_shapes)
mlir.register_lowering(_forward_p, mlir.lower_fun(_forward, multiple_results=True))


def run_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, start_C1: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's kernel for one list: output [B, T, N, H] and softmax statistics [C, N, T] in float32.

    Of the statistics T places belong to each document, counted from its first token. What belongs to no document of the
    list is not written.
    """
    B, T, N, H = q_BTNH.shape
    results = (
        jax.ShapeDtypeStruct((B, N, T, H), q_BTNH.dtype),
        jax.ShapeDtypeStruct((B * documents_per_row(T), N, T), jnp.float32),
        WORKSPACE,
    )
    call = _call('__cudnn$fmhaSoftmax', q_BTNH, k_BSKH, results, 1, window=window, is_backward=False)
    o_BNTH, statistics_CNT, _ = call(q_BTNH, k_BSKH, v_BSKH, *_lengths_and_offsets(q_BTNH, k_BSKH, start_C1))
    return o_BNTH.swapaxes(1, 2), statistics_CNT


def run_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    statistics_CNT: jax.Array,
    do_BTNH: jax.Array,
    o_BTNH: jax.Array,
    start_C1: jax.Array,
    *,
    window: int,
) -> tuple[jax.Array, ...]:
    """Gradients of q, k and v by cuDNN's kernel, for the documents of one list; see `run_forward`."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    results = (*(jax.ShapeDtypeStruct((B, heads, T, H), q_BTNH.dtype) for heads in (N, K, K)), WORKSPACE)
    call = _call('__cudnn$fmhaSoftmaxBackward', q_BTNH, k_BSKH, results, 3, window=window, is_backward=True)
    where = _lengths_and_offsets(q_BTNH, k_BSKH, start_C1)
    *gradients, _ = call(q_BTNH, k_BSKH, v_BSKH, statistics_CNT, do_BTNH, o_BTNH, *where)
    return tuple(gradient.swapaxes(1, 2) for gradient in gradients)


# XLA asks cuDNN how large it has to be.
WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)


def _lengths_and_offsets(q_BTNH: jax.Array, k_BSKH: jax.Array, start_C1: jax.Array) -> tuple[jax.Array, ...]:
    """The kernel's last four operands: for queries and for keys the tokens of each document, and where it begins.

    JAX's own wrapper counts where documents begin in heads of queries for keys too, before 0.11: wrong where K < N.
    """
    B, _, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    length_BM = jnp.diff(start_C1).reshape(B, -1)

    def offset(heads: int) -> jax.Array:
        # Counted in elements, in an array that has a row's end for each row, of which the kernel reads one.
        filled = jnp.pad(start_C1, (0, B - 1), mode='edge')
        return (filled * (heads * H)).reshape(B, -1)

    return length_BM, length_BM, offset(N), offset(K)


def _call(
    target: str, q_BTNH: jax.Array, k_BSKH: jax.Array, results: Any, num_heads: int, *, window: int, is_backward: bool
) -> Callable[..., Any]:
    """XLA's call of a kernel, whose first `num_heads` results have an axis of heads."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    B, T, N, H = q_BTNH.shape
    with mlir.make_ir_context():
        config = fused.create_dot_product_attention_backend_config(
            batch=B,
            num_heads=N,
            seq_q=T,
            seq_kv=T,
            dtype=mlir.dtype_to_ir_type(q_BTNH.dtype),
            fmha_scale=1 / math.sqrt(H),
            seed=0,
            dropout_rate=0.0,
            mask_type=fused.MaskType.PADDING_CAUSAL,
            layout=fused.AttentionLayout.BTNH.value,
            sliding_window_length=window or None,
            max_seg_per_batch=documents_per_row(T),
            is_paged_attention=False,
            is_bwd=is_backward,
        )
    layouts = [OUTPUT_LAYOUT if place < num_heads else None for place in range(len(results))]
    return jax.ffi.ffi_call(
        target, results, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=config
    )
