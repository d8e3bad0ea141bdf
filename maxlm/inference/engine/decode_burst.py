"""Multi-step decoding: the number of tokens of each row per decoding call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from maxlm.inference.engine.compiled_grammar import MIN_MASK_SECONDS

# Target upper bound of the duration of a call, because new requests wait for its end.
MAX_BURST_SECONDS = 0.08
# Number of tokens of the call after one in which a sample ends: its client may send the next request.
SHORT_BURST = 2
# EMA weight of the newest call.
_EMA_WEIGHT = 0.25


class DecodeBurst:
    """Chooses the number of tokens per decode call.

    More tokens per call reduce host overhead but delay new requests, which wait for the end of the call.
    """

    def __init__(self, max_tokens: int, pass_tokens: int = 1, clock: Callable[[], float] = time.perf_counter):
        """Initializes the policy.

        Args:
            max_tokens: maximum number of tokens per call.
            pass_tokens: maximum number of tokens per pass. A call for fewer would have no use for all drafts of a pass.
            clock: clock in seconds.
        """
        self._max_tokens, self._pass_tokens, self._clock = max_tokens, pass_tokens, clock
        # Time of the last result that the host received.
        self._last_result = -math.inf
        # EMA of the seconds per token.
        self._token_seconds: float | None = None
        self._frees_slot = False

    def num_tokens(self, remaining: Sequence[int], *, has_prefill: bool) -> int:
        """Returns the number of tokens of the next call.

        Args:
            remaining: number of tokens left for each active sample.
            has_prefill: a prefill chunk is waiting.
        """
        if has_prefill or self._token_seconds is None:
            num = 1
        else:
            # The burst ends at the latest when the first sample ends and frees its slot.
            max_fitting = int(MAX_BURST_SECONDS / max(self._token_seconds, 1e-6))
            num = min(self._max_tokens, max(self._pass_tokens, max_fitting), *remaining)
        if self._frees_slot:
            num = min(num, SHORT_BURST)
        self._frees_slot = num == min(remaining)
        return num

    @property
    def mask_delay(self) -> float:
        """Maximum number of seconds for which a call waits for token masks: the duration of one token."""
        return max(MIN_MASK_SECONDS, self._token_seconds or 0.0)

    def now(self) -> float:
        """Returns the time of a dispatch."""
        return self._clock()

    def record(self, dispatched: float, tokens: int) -> None:
        """Records the arrival of the result of a call dispatched at `dispatched`; `tokens` is 0 for a prefill."""
        now = self._clock()
        started, self._last_result = max(dispatched, self._last_result), now
        if tokens:
            seconds = (now - started) / tokens
            self._token_seconds = (
                seconds
                if self._token_seconds is None
                else self._token_seconds + _EMA_WEIGHT * (seconds - self._token_seconds)
            )
