"""Keys and values of positions that went through the model, for the tokens that follow.

Shapes: B batch, T query length, D dim, L layers, S slots, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.masks import layer_windows

# Logical axes of a cache's arrays; scales lack the last.
CACHE_AXES = ('layers', 'batch', 'kv_heads', 'length', 'head_dim')
# Rings have a multiple of so many slots.
MULTIPLE = 64
# Slots of a part of a layer's cache. A pass reads whole parts, and has some work with each.
SMALLEST_PART, LARGEST_PART = 128, 2048


class Cache(NamedTuple):
    """Some slots of one layer, or all of the layers that see equally far.

    Heads stand before slots, as products with them want it, and the arrays are changed in place: a call for one token
    copies no more than it reads. A position has slot `position mod S`.
    """

    key_LBKSH: jax.Array
    value_LBKSH: jax.Array
    # Of 8-bit codes: what a code is multiplied by, float32.
    key_scale_LBKS: jax.Array | None = None
    value_scale_LBKS: jax.Array | None = None

    @property
    def num_slots(self) -> int:
        return self.key_LBKSH.shape[3]


# By the number of last tokens that the layers see (0 is all), or for each layer parts of its slots in their order.
Caches = dict[int, Cache] | list[list[Cache]]


class Slots(NamedTuple):
    """What a layer reads of its part of a cache."""

    key_BKSH: jax.Array
    value_BKSH: jax.Array
    key_scale_BKS: jax.Array | None
    value_scale_BKS: jax.Array | None


class CacheIndices(NamedTuple):
    """Where the tokens of a call are in caches of a window."""

    # Slots that they go to; those that are out of range are left out.
    slots_BT: jax.Array
    # Slots before which all are that any of them sees.
    end: jax.Array
    # Row of the caches that the call's first row is.
    first_row: jax.Array | int


class LayerCache(NamedTuple):
    """What a layer has in its caches."""

    # Of its slots, in their order.
    parts: list[Cache]
    # Its number in each.
    layer: jax.Array | int

    def write(self, places: CacheIndices, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
        """With keys and values of the call's rows in their places."""
        new = [k_BTKH, v_BTKH]
        if self.parts[0].key_scale_LBKS is not None:
            codes_and_scales = zip(*map(_encode, new), strict=True)
            new = [x for pair in codes_and_scales for x in pair]
        parts, start = [], 0
        for part in self.parts:
            # Slots of other parts are out of range here.
            own = places._replace(slots_BT=places.slots_BT - start)
            arrays = [x for x in part if x is not None]
            parts.append(Cache(*(self._written(x, own, y) for x, y in zip(arrays, new, strict=True))))
            start += part.num_slots
        return self._replace(parts=parts)

    def read(self, part: int, first_row: jax.Array | int, num_rows: int) -> Slots:
        """All slots of a part, of some rows."""

        def rows(x_LBKS: jax.Array) -> jax.Array:
            if isinstance(first_row, int):
                return x_LBKS[self.layer, first_row : first_row + num_rows]
            return jax.lax.dynamic_slice_in_dim(x_LBKS[self.layer], first_row, num_rows, axis=0)

        key, value, *scales = self.parts[part]
        return Slots(rows(key), rows(value), *(None if x is None else rows(x) for x in scales))

    def _written(self, x_LBKS: jax.Array, places: CacheIndices, new_BTK: jax.Array) -> jax.Array:
        """x[layer, b, :, slots[b, t]] = new[b, t]"""
        slots_BT = places.slots_BT
        layers_BT = jnp.broadcast_to(jnp.asarray(self.layer, jnp.int32), slots_BT.shape)
        window = tuple(range(2, new_BTK.ndim))
        if len(slots_BT) == x_LBKS.shape[1]:
            # Told such that rows which are split over devices stay where they are.
            indices = jnp.stack([layers_BT, slots_BT], axis=-1)
            numbers = jax.lax.ScatterDimensionNumbers(window, (0, 3), (0, 3), (1,), (0,))
        else:
            rows_B1 = places.first_row + jnp.arange(len(slots_BT))[:, None]
            rows_BT = jnp.broadcast_to(rows_B1, slots_BT.shape)
            indices = jnp.stack([layers_BT, rows_BT, slots_BT], axis=-1)
            numbers = jax.lax.ScatterDimensionNumbers(window, (0, 1, 3), (0, 1, 3))
        new_BTK = new_BTK.astype(x_LBKS.dtype)
        return jax.lax.scatter(x_LBKS, indices, new_BTK, numbers, mode='drop', unique_indices=True)


def _encode(x_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """8-bit codes of each head's vector, and the scale [B, T, K] that its largest entry is 127 of."""
    x_BTKH = x_BTKH.astype(jnp.float32)
    scale_BTK = jnp.maximum(jnp.abs(x_BTKH).max(axis=-1), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(x_BTKH / scale_BTK[..., None]).astype(jnp.int8), scale_BTK


def init_caches(
    config: ModelConfig, batch: int, slots: int, *, chunk: int = 0, int8: bool = False, apart: bool = False
) -> Caches:
    """Empty caches for `batch` rows of up to `slots` positions each.

    Args:
        config: of the model.
        batch: rows.
        slots: positions of a row.
        chunk: tokens that come in one call, at most; layers with a sliding window then have a ring of slots for what
            their next call can see. 0: they have slots for all positions.
        int8: keep 8-bit codes with a scale for each head's vector, not values in the type of the computation.
        apart: for layers that do not run in a loop: each has arrays of its own, for one part of its slots after the
            other. A pass reads those that are in use, as they lie; of one large array it would have to copy them.
    """

    def needed(window: int) -> int:
        # The first token of a call sees window - 1 earlier ones when the last has been written.
        seen = window - 1 + chunk if window and chunk else slots
        return min(slots, -(-seen // MULTIPLE) * MULTIPLE)

    def make(layers: int, num: int) -> Cache:
        shape = (layers, batch, config.num_kv_heads, num, config.head_dim)
        if not int8:
            return Cache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
        codes, scales = (lambda: jnp.zeros(shape, jnp.int8)), (lambda: jnp.zeros(shape[:-1], jnp.float32))
        return Cache(codes(), codes(), scales(), scales())

    windows = layer_windows(config)
    if apart:
        return [[make(1, num) for num in block_sizes(needed(window))] for window in windows]
    return {window: make(windows.count(window), needed(window)) for window in sorted(set(windows))}


def block_sizes(num_slots: int) -> list[int]:
    """Slots of each part: as many as are before it, so that there are few parts and few slots are read in vain."""
    sizes, start = [], 0
    while start < num_slots:
        sizes.append(min(max(start, SMALLEST_PART), LARGEST_PART, num_slots - start))
        start += sizes[-1]
    return sizes


def slots_by_window(caches: Caches, config: ModelConfig) -> dict[int, int]:
    """Slots that a layer has, for each number of tokens that layers see: the same for all that see as far."""
    if isinstance(caches, dict):
        return {window: cache.num_slots for window, cache in caches.items()}
    nums = (sum(part.num_slots for part in parts) for parts in caches)
    return dict(zip(layer_windows(config), nums, strict=True))


def cache_indices_and_mask(
    num_slots: int,
    positions_BT: jax.Array,
    length_B: jax.Array | None,
    *,
    window: int,
    first_row: jax.Array | int = 0,
) -> tuple[CacheIndices, jax.Array]:
    """Where the tokens of a call go, and which slots they may look at then, [B, T, S].

    Args:
        num_slots: of layers that see `window`.
        positions_BT: of the call's tokens.
        length_B: tokens that each row has with these; positions behind are padding, which goes nowhere. None: none is.
        window: number of last tokens that a token sees; 0 is all.
        first_row: of the cache, that the call's first row is.
    """
    S = num_slots
    slots_BT = positions_BT % S
    if length_B is not None:
        slots_BT = jnp.where(positions_BT < length_B[:, None], slots_BT, S)
        newest_B1 = length_B[:, None] - 1
    else:
        newest_B1 = positions_BT.max(axis=1, keepdims=True)
    # The last position that has a slot is what is in it; below 0 nothing is.
    held_BS = newest_B1 - (newest_B1 - jnp.arange(S)[None, :]) % S
    behind_BTS = positions_BT[:, :, None] - held_BS[:, None, :]
    mask_BTS = (behind_BTS >= 0) & (held_BS >= 0)[:, None, :]
    places = CacheIndices(slots_BT, jnp.minimum(newest_B1.max() + 1, S), first_row)
    return places, mask_BTS & (behind_BTS < window) if window else mask_BTS
