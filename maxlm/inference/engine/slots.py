"""Slots of the engine: what each holds, and which one a prompt gets."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.inference.prefix_tree import common_prefix

# Shared tokens that are worth copying from a slot; fewer are as fast to recompute.
MIN_SHARED_TOKENS = 16
# Passes that did not need the current length before it shrinks.
SHRINK_AFTER_PASSES = 1000


class Slot:
    """A row of the cache.

    Attributes:
        number: of the row.
        sample: that has it; None: it is free.
        content: tokens whose keys and values it holds, at the positions 0, 1, 2, …
        num_written: positions that were ever written for this content, at most.
        last_used: step of the logical clock at its last assignment.
    """

    def __init__(self, number: int):
        self.number = number
        self.sample: Any = None
        self.content: list[int] = []
        self.num_written = 0
        self.last_used = 0

    def num_shared(self, prompt: np.ndarray) -> int:
        """Tokens that its content and a prompt begin with in common."""
        return common_prefix(np.array(self.content[: len(prompt)], prompt.dtype), prompt)


class CacheLength:
    """Positions per slot of the cache: the needed number, rounded up to a compiled size.

    Attributes:
        size: that there is.
    """

    def __init__(self, sizes: Sequence[int]):
        """The sizes grow; the first is where it starts."""
        self._sizes = sizes
        self.size = sizes[0]
        # Passes since more than the next smaller size was needed.
        self._passes_oversized = 0

    def fit(self, length: int, passes: int = 0) -> int:
        """The size that there should be.

        Args:
            length: positions of the slot that needs the most.
            passes: that this many are enough for. What was not needed for long is given up, with what idle slots hold
                there, because each pass reads all.
        """
        needed = next(size for size in self._sizes if size >= length)
        self._passes_oversized = 0 if needed >= self.size else self._passes_oversized + passes
        if needed > self.size or self._passes_oversized > SHRINK_AFTER_PASSES:
            self._passes_oversized = 0
            return needed
        return self.size


def choose_slot(
    slots: Sequence[Slot], prompt: np.ndarray, *, slack: float, row_counts: Sequence[int]
) -> tuple[Slot, Slot, int]:
    """The free slot for a prompt, the slot whose keys and values it takes over, and how many.

    Args:
        slots: of which one is free at least.
        prompt: ids; the last token always goes through the model.
        slack: positions after the shared ones that may have been written without loss. Rings lose old positions.
        row_counts: of the first slots that are decoded together, ascending: a slot among fewer makes all faster.
    """

    def num_reusable(slot: Slot) -> int:
        num = min(slot.num_shared(prompt), len(prompt) - 1)
        return num if num >= MIN_SHARED_TOKENS and slot.num_written <= num + slack else 0

    source = max(slots, key=num_reusable)
    num = num_reusable(source)
    free = [slot for slot in slots if slot.sample is None]
    # In place if little of its content is lost; another slot's content may be of use again.
    if num and source.sample is None and (num * 2 >= len(source.content) or len(free) == 1):
        return source, source, num
    # Least recently used of the slots that add the fewest rows.
    target = min(free, key=lambda slot: (bisect.bisect_right(row_counts, slot.number), slot.last_used, slot.number))
    return target, (source if num else target), num
