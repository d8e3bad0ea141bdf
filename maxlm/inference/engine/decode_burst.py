"""Multi-step decoding: the number of tokens of each row per decoding call, and the arguments of a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from maxlm.inference.engine.compiled_grammar import MIN_MASK_SECONDS
from maxlm.inference.engine.sequence import ActiveSequence
from maxlm.inference.sampling import Sampling

# Target upper bound of the duration of a call, because new requests wait for its end.
MAX_BURST_SECONDS = 0.08
# Number of tokens of the call after one in which a sample ends: its client may send the next request.
SHORT_BURST = 2
# EMA weight of the newest call.
_EMA_WEIGHT = 0.25
# Time of the host per call with a grammar, which the devices wait for, in passes. A guess: it depends on the model.
_HOST_PASSES = 0.25
# Sampling settings of idle slots.
_IDLE = Sampling(temperature=0)


class DecodeCall(NamedTuple):
    """Arguments of a decoding call.

    Attributes:
        samples: row, sample and number of tokens of each active row.
        num_tokens: number of tokens of each row, int32 [B].
        settings: sampling settings, seed and sample index of each row.
        masks: mask of each row, or None.
        forced: forced tokens of each row.
        max_length: maximum number of positions of a row after the call.
        with_top: True if a row needs the most likely tokens.
    """

    samples: list[tuple[int, ActiveSequence, int]]
    num_tokens: np.ndarray
    settings: list[tuple[Sampling, int, int]]
    masks: list[np.ndarray | None]
    forced: list[Sequence[int]]
    max_length: int
    with_top: bool

    @classmethod
    def of(cls, active: Sequence[tuple[int, ActiveSequence]], tokens: int, num_rows: int) -> DecodeCall:
        """Counts at most `tokens` new tokens of each sample, and returns the arguments of the call."""
        num_tokens, settings = np.zeros(num_rows, np.int32), [(_IDLE, 0, 0)] * num_rows
        masks: list[np.ndarray | None] = [None] * num_rows
        forced: list[Sequence[int]] = [()] * num_rows
        max_length = 1
        for row, sample in active:
            request = sample.request
            num_tokens[row] = min(tokens, sample.max_call_tokens)
            settings[row] = request.sampling, request.seed, sample.number
            if sample.matcher is not None:
                masks[row], forced[row] = sample.matcher.mask, sample.matcher.forced
            max_length = max(max_length, sample.dispatch(int(num_tokens[row])))
        samples = [(row, sample, int(num_tokens[row])) for row, sample in active]
        with_top = any(sample.request.top_log_probs for _, sample in active)
        return cls(samples, num_tokens, settings, masks, forced, max_length, with_top)


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

    def num_grammar_tokens(self, limits: Sequence[int]) -> int:
        """Returns the number of tokens of a call that gives the most tokens per time.

        Rows with fewer tokens wait for the others, and the devices wait for the masks of the next call.

        Args:
            limits: maximum number of tokens of each row.
        """
        return max(sorted(set(limits)), key=lambda num: sum(min(num, each) for each in limits) / (num + _HOST_PASSES))

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
