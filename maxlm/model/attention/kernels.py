"""Attention kernels for training and prefill without a cache, and their selection.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.cudnn import attend_documents, supports_documents
from maxlm.model.attention.ring import ring_attention
from maxlm.model.attention.splash import attend_splash, supports_length
from maxlm.model.attention.tokamax import attend_tokamax
from maxlm.parallel.partitioning import Axes, Partitioning


class AttentionInputs(NamedTuple):
    """Inputs of an attention kernel.

    Attributes:
        q_BTNH: queries.
        k_BSKH: keys; K divides N.
        v_BSKH: values.
        mask_BTS: True where a query attends to a key; None: causal. A kernel reads either this or `segments_BT`.
        segments_BT: index of the document of each token, with the same meaning as the mask; None: one document.
        softcap: limit of the scores (`maxlm.model.layers.softcap`); 0: none. cuDNN does not support it.
        sinks_N: logit of each head that joins the softmax's denominator, or None. Only `chunked` supports sinks.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    mask_BTS: jax.Array | None
    segments_BT: jax.Array | None
    softcap: float = 0.0
    sinks_N: jax.Array | None = None


# (inputs, window, partitioning) → softmax(q·k / sqrt(H)) · v, [B, T, N, H] in the dtype of q. `window` is the number of
# last tokens to which a query attends, including itself; 0: all.
AttentionKernel = Callable[[AttentionInputs, int, Partitioning], jax.Array]


def choose_attention_kernel(config: ModelConfig, partitioning: Partitioning) -> AttentionKernel:
    """Returns ring attention if the sequence length is sharded, otherwise the kernel of `model.attention`.

    Kernels are module-level functions, because NNX compares the static attributes of modules.
    """
    if partitioning.num_shards('length') > 1:
        return ring
    return KERNELS[config.attention]


def ring(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes ring attention over a sequence that is sharded in zigzag order."""
    assert inputs.sinks_N is None, 'ring attention does not support sinks'
    assert not inputs.softcap, 'ring attention does not support a soft cap of the scores'

    (mesh_axis,) = partitioning.mesh_axes('length')

    attend = partial(ring_attention, axis=mesh_axis, window=window)
    return attend_shards(attend, inputs, partitioning)


def attend_shards(attend: Callable[..., jax.Array], inputs: AttentionInputs, partitioning: Partitioning) -> jax.Array:
    """Runs a kernel that XLA cannot partition on each device, with the device's own rows and heads.

    Args:
        attend: (queries, keys, values, documents or None) → [B, T, N, H] of one device.
        inputs: inputs of all devices, without a mask and sinks.
        partitioning: partitioning of the model.
    """
    arrays = [inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH]
    arrays += [] if inputs.segments_BT is None else [inputs.segments_BT]

    def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        return attend(q, k, v, segments)

    if all(partitioning.num_shards(axis) == 1 for axis in ('batch', 'length', 'heads')):
        return attend_shard(*arrays)
    rows: Axes = ('batch', 'length')
    heads, kv_heads = (*rows, 'heads', 'head_dim'), (*rows, 'kv_heads', 'head_dim')
    axes = [heads, kv_heads, kv_heads, rows][: len(arrays)]
    attended: jax.Array = partitioning.per_shard(attend_shard, axes, heads)(*arrays)
    return attended


def chunked(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes attention in XLA for one block of queries at a time."""
    del partitioning
    q_BTNH, k_BSKH, v_BSKH, _, segments_BT, softcap, sinks_N = inputs
    return attend_blockwise(q_BTNH, k_BSKH, v_BSKH, segments_BT, window=window, softcap=softcap, sinks_N=sinks_N)


def splash(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes Splash attention on TPUs, or attention in XLA for unsupported lengths such as short prompts."""
    assert inputs.sinks_N is None, 'splash attention does not support sinks'
    if not supports_length(inputs.q_BTNH.shape[1]):
        return chunked(inputs, window, partitioning)
    return attend_shards(partial(attend_splash, window=window, softcap=inputs.softcap), inputs, partitioning)


def cudnn(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes cuDNN's flash attention, with a list of documents if the GPU supports it, otherwise with a mask."""
    q_BTNH, k_BSKH, v_BSKH, _, segments_BT, softcap, sinks_N = inputs
    if segments_BT is None or not supports_documents(q_BTNH, partitioning):
        return cudnn_mask(inputs, window, partitioning)
    assert not softcap, 'cuDNN does not support a soft cap of the scores'
    assert sinks_N is None, 'cuDNN does not support sinks'
    return attend_documents(q_BTNH, k_BSKH, v_BSKH, segments_BT, window=window, partitioning=partitioning)


def cudnn_mask(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes cuDNN's flash attention, with documents as a mask."""
    q_BTNH, k_BSKH, v_BSKH, mask_BTS, _, softcap, sinks_N = inputs
    assert not softcap, 'cuDNN does not support a soft cap of the scores'
    assert sinks_N is None, 'cuDNN does not support sinks'
    mask_BNTS = None
    if mask_BTS is not None:
        # JAX's batching rule of this kernel, which a pipeline needs, requires a mask for every head.
        num_heads = q_BTNH.shape[2] if partitioning.num_shards('layers') > 1 else 1
        B, T, S = mask_BTS.shape
        mask_BNTS = jnp.broadcast_to(mask_BTS[:, None], (B, num_heads, T, S))
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_BNTS,
        is_causal=mask_BTS is None,
        local_window_size=(window - 1, 0) if window and mask_BTS is None else None,
        implementation='cudnn',
    )


def tokamax(inputs: AttentionInputs, window: int, partitioning: Partitioning) -> jax.Array:
    """Computes the attention of Tokamax, which skips the keys of other documents and those before the window."""
    assert inputs.sinks_N is None, 'the attention of Tokamax does not support sinks'
    attend = partial(attend_tokamax, window=window, softcap=inputs.softcap, platform=partitioning.platform)
    return attend_shards(attend, inputs, partitioning)


# Kernels by `model.attention`.
KERNELS: dict[str, AttentionKernel] = {
    'xla': chunked,
    'splash': splash,
    'cudnn': cudnn,
    'cudnn_mask': cudnn_mask,
    'tokamax': tokamax,
}
