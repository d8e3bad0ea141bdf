"""Multi-step decoding: the number of tokens per decoding call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

# Seconds that a call takes, at most, where passes are short enough: what comes in the meantime waits so long.
MAX_BURST_SECONDS = 0.08
# Passes of the call after one in which a sample ends: its client may send the next request.
SHORT_BURST = 2
# Weight of the newest call in the moving average.
_EMA_WEIGHT = 0.25


class DecodeBurst:
    """Passes of one call: many are quicker, as what is between them is done once; but who comes waits for their end."""

    def __init__(self, max_passes: int, clock: Callable[[], float] = time.perf_counter):
        """A call never has more than `max_passes` passes; `clock` counts seconds."""
        self._max_passes, self._clock = max_passes, clock
        # When the host last got something.
        self._last_result = -math.inf
        # Moving average per pass.
        self._pass_seconds: float | None = None
        self._frees_slot = False

    def num_passes(self, remaining: Sequence[int], *, has_prefill: bool) -> int:
        """Passes of the next call.

        Args:
            left: tokens that samples still want, of each that is served.
            is_next: part of a prompt is to go through the model as soon as can be.
        """
        if has_prefill or self._pass_seconds is None:
            num = 1
        else:
            # Until the first sample ends and frees its slot.
            max_fitting = int(MAX_BURST_SECONDS / max(self._pass_seconds, 1e-6))
            num = min(self._max_passes, max(1, max_fitting), *remaining)
        if self._frees_slot:
            num = min(num, SHORT_BURST)
        self._frees_slot = num == min(remaining)
        return num

    def now(self) -> float:
        """Returns the time of a dispatch."""
        return self._clock()

    def record(self, dispatched: float, passes: int) -> None:
        """Records that the result of a call dispatched at `dispatched` has arrived; 0 passes: a prefill."""
        now = self._clock()
        started, self._last_result = max(dispatched, self._last_result), now
        if passes:
            seconds = (now - started) / passes
            self._pass_seconds = (
                seconds
                if self._pass_seconds is None
                else self._pass_seconds + _EMA_WEIGHT * (seconds - self._pass_seconds)
            )
