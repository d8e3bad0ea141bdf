"""Causal attention within packed documents and windows, with Tokamax's kernels for GPUs.

Tokamax (https://github.com/openxla/tokamax) takes the first key of every query. Its forward kernel skips the blocks of
keys before that of the first query of a block, so documents and windows cost no scores outside of them. Its backward
kernel masks them.

Shapes: B batch, T query length, S = T key length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from maxlm.errors import InputError
from maxlm.installation import pip_install


def attend_tokamax(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    *,
    window: int,
    platform: str,
    softcap: float = 0.0,
) -> jax.Array:
    """Computes softmax(q·k / sqrt(H)) · v over the keys of the query's document up to its position.

    Args:
        q_BTNH: queries, in bfloat16 or float16. A CPU computes Tokamax's formula in XLA, in any dtype.
        k_BTKH: keys; K divides N.
        v_BTKH: values.
        segments_BT: number of each token's document; a document is a run of equal numbers. None: each row is one.
        window: number of last tokens to which a query attends, including itself; 0: all.
        softcap: limit of the scores (`maxlm.model.layers.softcap`); 0: none.
        platform: platform of the device: cpu or gpu.

    Returns:
        [B, T, N, H] in the dtype of q.

    Raises:
        InputError: Tokamax is not installed, or has no kernel for these arrays on this device.
    """
    base, kernel = _tokamax(platform)
    first = first_keys(segments_BT, q_BTNH.shape[1], window)
    # All heads of a row have the same documents.
    mask = base.Mask(k_start=None if first is None else first[:, None], is_causal=True)
    try:
        o_BTNH: jax.Array = kernel(q_BTNH, k_BTKH, v_BTKH, mask=mask, logits_soft_cap=softcap or None)
    except NotImplementedError as error:
        raise InputError(
            f'model.attention=tokamax: no kernel for {q_BTNH.dtype} and heads of {q_BTNH.shape[-1]} on this device '
            f'({error}); set it to auto'
        ) from error
    return o_BTNH


def first_keys(segments_BT: jax.Array | None, length: int, window: int) -> jax.Array | None:
    """Returns the first key to which each query attends, int32 [B, T] or [1, T]; None if it is 0 for all queries."""
    position_1T = jnp.arange(length, dtype=jnp.int32)[None]
    first = None
    if segments_BT is not None:
        is_start_BT = jnp.ones_like(segments_BT, bool).at[:, 1:].set(segments_BT[:, 1:] != segments_BT[:, :-1])
        first = jax.lax.cummax(jnp.where(is_start_BT, position_1T, 0), axis=1)
    if window:
        first = jnp.maximum(position_1T - window + 1, 0 if first is None else first)
    return first


def _tokamax(platform: str) -> tuple[Any, Any]:
    """Returns the module with Tokamax's masks, and its attention on a platform."""
    try:
        # The public function takes documents only as an array of T × T.
        from tokamax._src.ops.attention import base, pallas_mosaic_gpu
    except ImportError as error:
        raise InputError(
            f'model.attention=tokamax: the package tokamax is not installed or has no such kernel ({error}); run '
            f'{pip_install("experts")}, or set it to auto'
        ) from error
    # Tokamax reads options from absl's flags. Otherwise it would parse the command line, which has maxlm's options.
    flags.FLAGS.mark_as_parsed()
    return base, pallas_mosaic_gpu.PallasMosaicGpuFlashAttention() if platform == 'gpu' else base.DotProductAttention()
