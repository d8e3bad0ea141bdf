"""Attention with an explicit mask, the reference for the kernels."""

import jax

from maxlm.model.attention.decode import attend_slots
from maxlm.model.layers.kv_cache import Slots


def masked_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Returns softmax(q·k / sqrt(H)) · v over the keys that the mask allows."""
    return attend_slots(q_BTNH, Slots(k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), None, None), mask_BTS)
