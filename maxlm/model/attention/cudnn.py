"""cuDNN flash attention within packed documents, given by a list of their offsets instead of a mask.

With a mask, cuDNN computes every score and adds an array [B, T, S] to the scores. With a list of documents, it skips
the scores between different documents, as it skips future keys. The list contains the documents of all rows on a device
and has a fixed length. If a device has more documents, it runs the kernel once per list.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim, M listed documents per
row, C = B·M length of a list, X = T+M+1.
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

from maxlm.config.schema import Config
from maxlm.parallel.partitioning import Partitioning

# The length of a list assumes documents of at least TOKENS_PER_DOCUMENT tokens, and at most MAX_DOCUMENTS per row.
# During the kernel cuDNN needs a row of T float32 per head for every entry of the list, and it passes over these rows.
# On an H200, 256 entries for 16,384 tokens take 0.48 ms of the 1.5 ms of attention in a layer of the 1B model. Each
# further list takes about as long as the entries that it saves.
TOKENS_PER_DOCUMENT = 256
MAX_DOCUMENTS = 64
# Name scope of the loop over all lists except the first. Further lists are rare.
MORE_LISTS = 'more_lists_of_documents'
# Memory layout of cuDNN's outputs [B, N, T, H], which are stored as [B, T, N, H] like q.
OUTPUT_LAYOUT = (0, 2, 1, 3)
# Minimum compute capability of GPUs whose cuDNN accepts lists of documents: Hopper.
DOCUMENTS_CAPABILITY = (9, 0)


class Documents(NamedTuple):
    """int32 description of the documents on one device, numbered consecutively over all rows.

    Attributes:
        number_BT: number of each token's document.
        start_BX: number of tokens on the device before each document, over all rows; B·T after the last document.
    """

    number_BT: jax.Array
    start_BX: jax.Array


def lists_documents(config: Config, capability: tuple[int, int] | None) -> bool:
    """Returns True if the steps of a resolved config pass lists of documents to cuDNN, on GPUs of this capability."""
    has_lists = config.data.document_mask and config.mesh.context == config.mesh.stage == 1
    is_supported = capability is not None and capability >= DOCUMENTS_CAPABILITY
    return config.model.attention == 'cudnn' and has_lists and is_supported


def supports_documents(q_BTNH: jax.Array, partitioning: Partitioning) -> bool:
    """Returns True if cuDNN supports a list of documents for these queries.

    This requires a Hopper or later GPU, either present or as the target of compilation. Pipelines are not supported,
    because their stages are a vmap.
    """
    if partitioning.num_shards('layers') > 1:
        return False
    # JAX's own attention calls this private function, and `maxlm.planning.gpu_targets` mocks it for other machines.
    from jax._src.cudnn import fused_attention_stablehlo

    on_device = q_BTNH.size // (partitioning.num_shards('batch') * partitioning.num_shards('heads'))
    # Offsets of documents are int32 and counted in elements.
    needed = '.'.join(map(str, DOCUMENTS_CAPABILITY))
    return on_device < 2**31 and fused_attention_stablehlo.check_compute_capability(needed)


def attend_documents(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array,
    *,
    window: int,
    partitioning: Partitioning,
) -> jax.Array:
    """Computes causal attention in which tokens attend only to their own document.

    Args:
        q_BTNH: queries, in bfloat16 or float16.
        k_BSKH: keys; K divides N.
        v_BSKH: values.
        segments_BT: numbers of documents; a document is a run of equal numbers in a row. Padding also counts as a
            document, so its output is finite.
        window: number of last tokens to which a query attends, including itself; 0: all.
        partitioning: partitioning of the model; each device processes its own rows and heads.

    Returns:
        [B, T, N, H] in the dtype of q.
    """

    def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return _attend(q, k, v, list_documents(segments), window)

    if partitioning.num_shards('batch') * partitioning.num_shards('heads') > 1:
        rows = ('batch', 'length')
        heads, kv_heads = (*rows, 'heads', 'head_dim'), (*rows, 'kv_heads', 'head_dim')
        # Each device has its own list, which a partitioning rule of the kernel could not express.
        attend_shard = partitioning.per_shard(attend_shard, [heads, kv_heads, kv_heads, rows], heads)
    return attend_shard(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def list_documents(segments_BT: jax.Array) -> Documents:
    """Lists the runs of equal numbers in the rows of one device."""
    B, T = segments_BT.shape
    is_first_BT = jnp.ones((B, T), bool).at[:, 1:].set(segments_BT[:, 1:] != segments_BT[:, :-1])
    is_first = is_first_BT.reshape(-1)
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    start = jnp.full(B * (T + documents_per_row(T) + 1), B * T, jnp.int32)
    # Tokens that do not start a document have an index out of range and are dropped.
    start = start.at[jnp.where(is_first, number, start.size)].set(jnp.arange(B * T, dtype=jnp.int32), mode='drop')
    return Documents(number.reshape(B, T), start.reshape(B, -1))


def documents_per_row(length: int) -> int:
    """Returns M, the number of listed documents per row, at least 2 as required by cuDNN."""
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
        # The kernel does not read beyond the end of a document.
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
        # Statistics per token take less memory than cuDNN's statistics per list, and do not depend on the list.
        place_BT = jnp.clip(number_BT - listed.first, 0, B * documents_per_row(T) - 1)
        within_BT = jnp.clip(token_BT - listed.start_C1[place_BT], 0, T - 1)
        return o_BTNH, statistics_CNT[place_BT, :, within_BT]

    return _for_all_documents(run, documents)


class _List(NamedTuple):
    """Consecutive documents for one run of the kernel.

    Attributes:
        first: number of the first document.
        start_C1: tokens on the device before each document of the list, and before the document after the list.
    """

    first: jax.Array
    start_C1: jax.Array


def _for_all_documents(run: Callable[[_List], tuple[jax.Array, ...]], documents: Documents) -> tuple[jax.Array, ...]:
    """Runs `run` for every list and combines its results, arrays [B, T, …] that are valid for the listed documents.

    The first list nearly always contains all documents. The number of lists is determined on the device, so every
    number of documents is supported.
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
    # A condition around the loop would make XLA copy the results even if there is only one list.
    with jax.named_scope(MORE_LISTS):
        return jax.lax.while_loop(lambda carry: carry[0] * C <= last, add_list, (jnp.int32(1), results))[1]


def _forward_shapes(
    q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, number_BT: Any, start_BX: Any, *, window: int
) -> tuple[Any, ...]:
    return q_BTNH, jax.core.ShapedArray(q_BTNH.shape[:3], jnp.float32)


# A separate primitive, because rematerialization policies see only primitives. The policies in `rematerialize` save the
# results of this one by its name. Applied to its parts, they would save the statistics per list.
_forward_p = Primitive('documents_dot_product_attention_fwd')
_forward_p.multiple_results = True
_forward_p.def_impl(_forward)
_forward_p.def_abstract_eval(_forward_shapes)
mlir.register_lowering(_forward_p, mlir.lower_fun(_forward, multiple_results=True))


def run_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, start_C1: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Runs cuDNN's forward kernel for one list.

    Returns:
        The output [B, T, N, H] and the float32 softmax statistics [C, N, T]. The T statistics of a document start at
        its first token. Elements that belong to no document of the list are not written.
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
    """Runs cuDNN's backward kernel for one list and returns the gradients of q, k and v; see `run_forward`."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    results = (*(jax.ShapeDtypeStruct((B, heads, T, H), q_BTNH.dtype) for heads in (N, K, K)), WORKSPACE)
    call = _call('__cudnn$fmhaSoftmaxBackward', q_BTNH, k_BSKH, results, 3, window=window, is_backward=True)
    where = _lengths_and_offsets(q_BTNH, k_BSKH, start_C1)
    *gradients, _ = call(q_BTNH, k_BSKH, v_BSKH, statistics_CNT, do_BTNH, o_BTNH, *where)
    return tuple(gradient.swapaxes(1, 2) for gradient in gradients)


# XLA queries the size of the workspace from cuDNN.
WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)


def _lengths_and_offsets(q_BTNH: jax.Array, k_BSKH: jax.Array, start_C1: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the kernel's last four operands: lengths of documents for queries and keys, and offsets for both.

    The wrapper in JAX before 0.11 computes the offsets of keys with the number of query heads, which is wrong if K < N.
    """
    B, _, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    length_BM = jnp.diff(start_C1).reshape(B, -1)

    def offset(heads: int) -> jax.Array:
        # Offsets are counted in elements. The array has one final offset per row, of which the kernel reads one.
        filled = jnp.pad(start_C1, (0, B - 1), mode='edge')
        return (filled * (heads * H)).reshape(B, -1)

    return length_BM, length_BM, offset(N), offset(K)


def _call(
    target: str, q_BTNH: jax.Array, k_BSKH: jax.Array, results: Any, num_heads: int, *, window: int, is_backward: bool
) -> Callable[..., Any]:
    """Returns a function that calls a cuDNN kernel whose first `num_heads` results have an axis of heads."""
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
