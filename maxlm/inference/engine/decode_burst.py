"""How many tokens a decoding call draws before the host looks at what came."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

# Seconds that a call takes, at most, where passes are short enough: what comes in the meantime waits so long.
LONGEST_CALL = 0.08
# Passes of the call behind one in which a sample ends: who asked may ask again.
SHORT = 2
# Of the newest call in the mean.
_NEWEST = 0.25


class DecodeBurst:
    """Passes of one call: many are quicker, as what is between them is done once; but who comes waits for their end."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter):
        """A call never has more than `most` passes; `clock` counts seconds."""
        self._most, self._clock = most, clock
        # When the host last got something.
        self._last = -math.inf
        # Of a pass, a mean over calls.
        self._seconds: float | None = None
        self._is_free = False

    def passes(self, left: Sequence[int], *, is_next: bool) -> int:
        """Passes of the next call.

        Args:
            left: tokens that samples still want, of each that is served.
            is_next: part of a prompt is to go through the model as soon as can be.
        """
        if is_next or self._seconds is None:
            num = 1
        else:
            # To the end of the first, which makes room.
            fitting = int(LONGEST_CALL / max(self._seconds, 1e-6))
            num = min(self._most, max(1, fitting), *left)
        if self._is_free:
            num = min(num, SHORT)
        self._is_free = num == min(left)
        return num

    def now(self) -> float:
        """When something is asked of the devices, which do one thing after the other."""
        return self._clock()

    def came(self, asked: float, passes: int) -> None:
        """The host has what it asked for then; 0 passes: something other than tokens of decoding."""
        now = self._clock()
        begun, self._last = max(asked, self._last), now
        if passes:
            seconds = (now - begun) / passes
            self._seconds = seconds if self._seconds is None else self._seconds + _NEWEST * (seconds - self._seconds)
