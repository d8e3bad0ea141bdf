"""Key-value caches of one model for all slots: shapes, shardings and changes of their length.

Shapes: L layers, B slots, K key/value heads, S positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.config.schema import ModelConfig
from maxlm.model.layers.kv_cache import Caches, cache_axes, init_caches, slots_by_window
from maxlm.parallel.layout import Layout


class SlotCaches:
    """Creates and resizes the caches of a model. Holds no arrays."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        num_slots: int,
        max_context: int,
        chunk: int,
        int8: bool,
        unstacked: bool,
        in_blocks: bool,
    ):
        """Defines the caches.

        Args:
            config: config of the model.
            layout: layout of the parameters.
            num_slots: number of slots.
            max_context: maximum number of positions per slot.
            chunk, int8, unstacked, in_blocks: see `init_caches`.
        """
        self._config, self._layout, self._max_context = config, layout, max_context
        self._axes = cache_axes(config)
        self._init = partial(
            init_caches, config, num_slots, chunk=chunk, int8=int8, unstacked=unstacked, in_blocks=in_blocks
        )
        # One array at a time limits peak memory.
        self._resize_array = jax.jit(self._resized, static_argnames='num')

    def init(self, cache_length: int) -> Caches:
        """Returns empty caches with `cache_length` positions per slot."""
        return self._init(cache_length)

    def shardings(self) -> Any:
        """Returns the sharding of each array."""
        shapes = self._shapes(self._max_context)
        return jax.tree.map(lambda x: self._layout.named(*self._axes[: x.ndim]), shapes)

    def ring_slots(self) -> dict[int, int]:
        """Returns {window: number of slots} of the sliding-window layers whose cache is shorter than the context."""
        num_slots = slots_by_window(self._shapes(self._max_context), self._config).items()
        return {window: num for window, num in num_slots if num < self._max_context}

    def num_bytes(self) -> int:
        """Returns the bytes of all slots at the largest cache length."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes(self._max_context)))

    def resize(self, caches: Caches, cache_length: int) -> Caches:
        """Returns the caches with `cache_length` positions per slot; later positions are dropped."""
        arrays, tree = jax.tree.flatten(caches)
        for index, like in enumerate(jax.tree.leaves(self._shapes(cache_length))):
            if arrays[index].shape != like.shape:
                arrays[index] = self._resize_array(arrays[index], num=like.shape[3])
        resized: Caches = jax.tree.unflatten(tree, arrays)
        return resized

    def _shapes(self, cache_length: int) -> Caches:
        return jax.eval_shape(partial(self._init, cache_length))

    def _resized(self, x_LBKS: jax.Array, *, num: int) -> jax.Array:
        """Returns a cache array with `num` positions."""
        S = x_LBKS.shape[3]
        if num < S:
            x_LBKS = x_LBKS[:, :, :, :num]
        else:
            x_LBKS = jnp.pad(x_LBKS, [(0, num - S if axis == 3 else 0) for axis in range(x_LBKS.ndim)])
        return self._layout.constrain(x_LBKS, self._axes[: x_LBKS.ndim])
