"""Prefix cache: the cache slots of the engine and their assignment to prompts that begin with the same tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.config.sections.quantization import KV_CACHE_DTYPES
from maxlm.errors import InputError
from maxlm.inference.prefix_tree import common_prefix

# Minimum number of shared tokens for copying a slot; fewer tokens are as fast to recompute.
MIN_SHARED_TOKENS = 16
# Number of passes with unneeded cache length before it shrinks.
SHRINK_AFTER_PASSES = 1000


class Slot:
    """A row of the cache.

    Attributes:
        number: index of the row.
        sample: sample that uses the slot, or None if the slot is free.
        content: tokens whose keys and values are cached, at positions 0, 1, 2, …
        salt: `Request.cache_salt` of the request that wrote the content.
        num_written: upper bound of the positions written since the content started.
        last_used: step of the logical clock at the last assignment.
    """

    def __init__(self, number: int):
        self.number = number
        self.sample: Any = None
        self.content: list[int] = []
        self.salt = ''
        self.num_written = 0
        self.last_used = 0

    def num_shared(self, prompt: np.ndarray) -> int:
        """Returns the length of the common prefix of the content and a prompt."""
        return common_prefix(np.array(self.content[: len(prompt)], prompt.dtype), prompt)


class CacheLength:
    """Number of positions per slot: the required number, rounded up to a compiled size.

    Attributes:
        size: current size.
    """

    def __init__(self, sizes: Sequence[int]):
        """Initializes the length with the first of the ascending compiled sizes."""
        self._sizes = sizes
        self.size = sizes[0]
        # Number of passes for which a smaller size would have been enough.
        self._passes_oversized = 0

    def fit(self, length: int, passes: int = 0) -> int:
        """Returns the size that the cache should have.

        The cache shrinks if a smaller size was sufficient for more than SHRINK_AFTER_PASSES passes, because every pass
        reads the full length. Idle slots lose the content beyond the new size.

        Args:
            length: maximum number of positions that a slot needs.
            passes: number of passes that this length is sufficient for.
        """
        needed = next(size for size in self._sizes if size >= length)
        self._passes_oversized = 0 if needed >= self.size else self._passes_oversized + passes
        if needed > self.size or self._passes_oversized > SHRINK_AFTER_PASSES:
            self._passes_oversized = 0
            return needed
        return self.size


def choose_slot(
    slots: Sequence[Slot], prompt: np.ndarray, *, slack: float, row_counts: Sequence[int], salt: str = ''
) -> tuple[Slot, Slot, int]:
    """Chooses the slot for a prompt and the slot whose keys and values it reuses.

    Args:
        slots: all slots, at least one of them free.
        prompt: token ids. The last token is always recomputed.
        slack: number of positions after the shared ones that may have been written without overwriting them in
            ring buffers.
        row_counts: ascending numbers of first slots that are decoded together. Decoding fewer rows is faster.
        salt: only slots with this salt are reused.

    Returns:
        The target slot, the source slot, and the number of reused tokens.
    """

    def num_reusable(slot: Slot) -> int:
        num = min(slot.num_shared(prompt), len(prompt) - 1) if slot.salt == salt else 0
        return num if num >= MIN_SHARED_TOKENS and slot.num_written <= num + slack else 0

    source = max(slots, key=num_reusable)
    num = num_reusable(source)
    free = [slot for slot in slots if slot.sample is None]
    # Reuse in place if little content is lost. Otherwise copy, because the content may be reused again.
    if num and source.sample is None and (num * 2 >= len(source.content) or len(free) == 1):
        return source, source, num
    # Choose the slot that requires the fewest rows, and the least recently used one among equals.
    target = min(free, key=lambda slot: (bisect.bisect_right(row_counts, slot.number), slot.last_used, slot.number))
    return target, (source if num else target), num


def check_settings(context: int, *, max_context: int, cache: str, max_queue_size: int) -> None:
    """Raises InputError if a setting of `Engine` is out of range. `context` is the context length of the model."""
    if not 0 <= max_context <= context:
        raise InputError(
            f'max_context={max_context}: must be from 1 to {context}, the context length of the model, or 0 for all'
        )
    if cache not in KV_CACHE_DTYPES:
        raise InputError(f'cache={cache}: must be one of {", ".join(KV_CACHE_DTYPES)}')
    if max_queue_size < 0:
        raise InputError(f'max_queue_size={max_queue_size}: must be at least 0')
