"""KV cache: the keys and values of earlier tokens, which decoding reads instead of computing them again.

Shapes: B batch, T query length, D dim, L layers, S slots, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.masks import layer_windows

# The number of slots of a sliding-window layer is a multiple of this.
MULTIPLE = 64
# Slots of a block of a layer's cache. A call reads complete blocks, at some cost per block.
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 128, 2048


class Cache(NamedTuple):
    """A block of slots of one layer, or all slots of the layers with the same window.

    Heads precede slots, because batched matmuls need that order. XLA updates the arrays in place, so a call for one
    token copies no more than it reads. Position p is in slot p mod S.

    Latent attention has one head for all query heads: `key` is the latent, [L, B, 1, S, kv_lora_rank], and `value` is
    the rotated part of the keys, [L, B, 1, S, qk_rope_head_dim].
    """

    key_LBKSH: jax.Array
    value_LBKSH: jax.Array
    # float32 scales of 8-bit codes; None without quantization.
    key_scale_LBKS: jax.Array | None = None
    value_scale_LBKS: jax.Array | None = None

    @property
    def num_slots(self) -> int:
        return self.key_LBKSH.shape[3]


# Caches by window (0: all tokens), or for each layer the blocks of its slots in order.
Caches = dict[int, Cache] | list[list[Cache]]


class Slots(NamedTuple):
    """Keys and values of one layer, in one block of its cache."""

    key_BKSH: jax.Array
    value_BKSH: jax.Array
    key_scale_BKS: jax.Array | None
    value_scale_BKS: jax.Array | None


class CacheIndices(NamedTuple):
    """Slots of the tokens of a call in the caches of one window.

    Attributes:
        slots_BT: slot of each token; tokens whose slot is out of range are not written.
        end: upper bound of the slots that any token of the call attends to.
        first_row: row of the caches that corresponds to row 0 of the call.
    """

    slots_BT: jax.Array
    end: jax.Array
    first_row: jax.Array | int


class LayerCache(NamedTuple):
    """The cache of one layer.

    Attributes:
        blocks: blocks of its slots in order.
        layer: index of the layer in the first axis of each block.
    """

    blocks: list[Cache]
    layer: jax.Array | int

    def write(self, cache_indices: CacheIndices, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
        """Returns the cache with the call's keys and values written to their slots."""
        new = [k_BTKH, v_BTKH]
        if self.blocks[0].key_scale_LBKS is not None:
            codes_and_scales = zip(*map(encode, new), strict=True)
            new = [x for pair in codes_and_scales for x in pair]
        blocks, start = [], 0
        for block in self.blocks:
            # Slots of other blocks are out of range.
            own = cache_indices._replace(slots_BT=cache_indices.slots_BT - start)
            arrays = [x for x in block if x is not None]
            blocks.append(Cache(*(self._written(x, own, y) for x, y in zip(arrays, new, strict=True))))
            start += block.num_slots
        return self._replace(blocks=blocks)

    def read(self, block: int, first_row: jax.Array | int, num_rows: int) -> Slots:
        """Returns all slots of a block, of `num_rows` rows from `first_row`."""

        def rows(x_LBKS: jax.Array) -> jax.Array:
            if isinstance(first_row, int):
                return x_LBKS[self.layer, first_row : first_row + num_rows]
            return jax.lax.dynamic_slice_in_dim(x_LBKS[self.layer], first_row, num_rows, axis=0)

        key, value, *scales = self.blocks[block]
        return Slots(rows(key), rows(value), *(None if x is None else rows(x) for x in scales))

    def _written(self, x_LBKS: jax.Array, cache_indices: CacheIndices, new_BTK: jax.Array) -> jax.Array:
        """Returns x after x[layer, b, :, slots[b, t]] = new[b, t]."""
        slots_BT = cache_indices.slots_BT
        layers_BT = jnp.broadcast_to(jnp.asarray(self.layer, jnp.int32), slots_BT.shape)
        window_axes = tuple(range(2, new_BTK.ndim))
        if len(slots_BT) == x_LBKS.shape[1]:
            # With rows as a batching dimension, sharded rows do not move to other devices.
            indices = jnp.stack([layers_BT, slots_BT], axis=-1)
            numbers = jax.lax.ScatterDimensionNumbers(window_axes, (0, 3), (0, 3), (1,), (0,))
        else:
            rows_B1 = cache_indices.first_row + jnp.arange(len(slots_BT))[:, None]
            rows_BT = jnp.broadcast_to(rows_B1, slots_BT.shape)
            indices = jnp.stack([layers_BT, rows_BT, slots_BT], axis=-1)
            numbers = jax.lax.ScatterDimensionNumbers(window_axes, (0, 1, 3), (0, 1, 3))
        new_BTK = new_BTK.astype(x_LBKS.dtype)
        return jax.lax.scatter(x_LBKS, indices, new_BTK, numbers, mode='drop', unique_indices=True)


def cache_axes(config: ModelConfig) -> tuple[str, ...]:
    """Returns the logical axes of a cache's arrays; scales lack the last. Latents are the same for all heads."""
    return ('layers', 'batch', 'latent' if config.kv_lora_rank else 'kv_heads', 'length', 'head_dim')


def encode(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns 8-bit codes of each head's vector, and its scale [B, T, K]: the largest absolute entry divided by 127."""
    x_BTKH = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.maximum(jnp.abs(x_BTKH).max(axis=-1), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(x_BTKH / scale_BTK[..., None]).astype(jnp.int8), scale_BTK


def init_caches(
    config: ModelConfig,
    batch: int,
    slots: int,
    *,
    chunk: int = 0,
    int8: bool = False,
    unstacked: bool = False,
    in_blocks: bool = True,
) -> Caches:
    """Returns empty caches for `batch` rows of up to `slots` positions each.

    Args:
        config: config of the model.
        batch: number of rows.
        slots: number of positions per row.
        chunk: largest number of tokens in one call. Layers with a sliding window then have a ring buffer of the slots
            to which their next call can attend. 0: these layers have slots for all positions.
        int8: if True, store 8-bit codes with one scale per head vector instead of values in the model's dtype.
        unstacked: if True, return separate arrays for each layer, for layers that do not run in a loop.
        in_blocks: if True, separate arrays are split into blocks of slots. A call then reads the blocks in use without
            copying them from a larger array, but decides about each block.
    """

    def needed(window: int) -> int:
        # The first token of a call attends to window - 1 earlier tokens, after all tokens of the call were written.
        seen = window - 1 + chunk if window and chunk else slots
        return min(slots, -(-seen // MULTIPLE) * MULTIPLE)

    def make(layers: int, num: int) -> Cache:
        rows = (layers, batch, 1 if config.kv_lora_rank else config.num_kv_heads, num)
        widths = (config.kv_lora_rank or config.head_dim, config.qk_rope_head_dim or config.head_dim)
        key, value = (jnp.zeros((*rows, width), jnp.int8 if int8 else config.dtype) for width in widths)
        scales = (jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32)) if int8 else ()
        return Cache(key, value, *scales)

    windows = layer_windows(config)
    if unstacked:
        sizes = [block_sizes(needed(window)) if in_blocks else [needed(window)] for window in windows]
        return [[make(1, num) for num in nums] for nums in sizes]
    return {window: make(windows.count(window), needed(window)) for window in sorted(set(windows))}


def block_sizes(num_slots: int) -> list[int]:
    """Returns the number of slots of each block.

    Each block is as large as all previous blocks together, within MIN_BLOCK_SIZE and MAX_BLOCK_SIZE. This limits both
    the number of blocks and the number of unused slots that are read.
    """
    sizes, start = [], 0
    while start < num_slots:
        sizes.append(min(max(start, MIN_BLOCK_SIZE), MAX_BLOCK_SIZE, num_slots - start))
        start += sizes[-1]
    return sizes


def slots_by_window(caches: Caches, config: ModelConfig) -> dict[int, int]:
    """Returns the number of slots of a layer for each window."""
    if isinstance(caches, dict):
        return {window: cache.num_slots for window, cache in caches.items()}
    nums = (sum(block.num_slots for block in blocks) for blocks in caches)
    return dict(zip(layer_windows(config), nums, strict=True))


def cache_indices_and_mask(
    num_slots: int,
    positions_BT: jax.Array,
    length_B: jax.Array | None,
    *,
    window: int,
    first_row: jax.Array | int = 0,
) -> tuple[CacheIndices, jax.Array]:
    """Returns the slots to which the tokens of a call are written, and the mask [B, T, S] of their attention.

    Args:
        num_slots: slots of the layers with this window.
        positions_BT: positions of the call's tokens.
        length_B: length of each row including these tokens; later positions are padding, which is not written. None:
            no padding.
        window: number of last tokens to which a token attends; 0: all.
        first_row: row of the cache that corresponds to row 0 of the call.
    """
    S = num_slots
    slots_BT = positions_BT % S
    if length_B is not None:
        slots_BT = jnp.where(positions_BT < length_B[:, None], slots_BT, S)
        newest_B1 = length_B[:, None] - 1
    else:
        newest_B1 = positions_BT.max(axis=1, keepdims=True)
    # A slot holds the last position that maps to it; a negative number means that it is empty.
    held_BS = newest_B1 - (newest_B1 - jnp.arange(S)[None, :]) % S
    behind_BTS = positions_BT[:, :, None] - held_BS[:, None, :]
    mask_BTS = (behind_BTS >= 0) & (held_BS >= 0)[:, None, :]
    cache_indices = CacheIndices(slots_BT, jnp.minimum(newest_B1.max() + 1, S), first_row)
    return cache_indices, mask_BTS & (behind_BTS < window) if window else mask_BTS
