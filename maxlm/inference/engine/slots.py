"""Slots of the engine: what each holds, and which one a prompt gets."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.inference.prefix_tree import common_prefix

# Tokens that are worth taking over from a slot: fewer are as fast computed with the rest.
SMALLEST_SHARED = 16
# Passes that did without some room before it is given up.
SPARE_PASSES = 1000


class Slot:
    """A row of the cache.

    Attributes:
        number: of the row.
        sample: that has it; None: it is free.
        content: tokens whose keys and values it holds, at the positions 0, 1, 2, …
        written: positions that were ever written for this content, at most.
        used: when it was last given away, of a clock that counts.
    """

    def __init__(self, number: int):
        self.number = number
        self.sample: Any = None
        self.content: list[int] = []
        self.written = 0
        self.used = 0

    def holds(self, prompt: np.ndarray) -> int:
        """Tokens that its content and a prompt begin with in common."""
        return common_prefix(np.array(self.content[: len(prompt)], prompt.dtype), prompt)


class FreeSlot:
    """How many positions of each slot there is room for: as many as are needed, in sizes that programs are made for.

    Attributes:
        size: that there is.
    """

    def __init__(self, sizes: Sequence[int]):
        """The sizes grow; the first is where it starts."""
        self._sizes = sizes
        self.size = sizes[0]
        # Passes since more than the next smaller size was needed.
        self._spare = 0

    def fit(self, length: int, passes: int = 0) -> int:
        """The size that there should be.

        Args:
            length: positions of the slot that needs the most.
            passes: that this many are enough for. What was not needed for long is given up, with what idle slots hold
                there, because each pass reads all.
        """
        needed = next(size for size in self._sizes if size >= length)
        self._spare = 0 if needed >= self.size else self._spare + passes
        if needed > self.size or self._spare > SPARE_PASSES:
            self._spare = 0
            return needed
        return self.size


def choose_slot(
    slots: Sequence[Slot], prompt: np.ndarray, *, room: float, counts: Sequence[int]
) -> tuple[Slot, Slot, int]:
    """The free slot for a prompt, the slot whose keys and values it takes over, and how many.

    Args:
        slots: of which one is free at least.
        prompt: ids; the last token always goes through the model.
        room: positions behind the shared ones that may have been written without loss. Rings lose old positions.
        counts: of the first slots that are served together, growing: a slot among fewer makes all faster.
    """

    def shared(slot: Slot) -> int:
        num = min(slot.holds(prompt), len(prompt) - 1)
        return num if num >= SMALLEST_SHARED and slot.written <= num + room else 0

    source = max(slots, key=shared)
    num = shared(source)
    free = [slot for slot in slots if slot.sample is None]
    # In place if little of its content is lost; another slot's content may be of use again.
    if num and source.sample is None and (num * 2 >= len(source.content) or len(free) == 1):
        return source, source, num
    # Of those that widen what is served the least, the one that was not used for longest.
    target = min(free, key=lambda slot: (bisect.bisect_right(counts, slot.number), slot.used, slot.number))
    return target, (source if num else target), num
