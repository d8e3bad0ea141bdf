"""Measures the time for which generation waits for an environment, such as the tools of a rollout."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from maxlm.rl.tool_environment import Environment, Reply


@dataclasses.dataclass
class Stopwatch:
    """Seconds that were measured so far."""

    seconds: float = 0.0


class TimedEnvironment:
    """An environment whose replies are timed."""

    def __init__(self, environment: Environment, stopwatch: Stopwatch):
        """`stopwatch` receives the seconds of each call."""
        self._environment, self._stopwatch = environment, stopwatch

    def replies(self, turns: Sequence[Sequence[int]], max_calls: Sequence[int]) -> list[Reply | None]:
        """See `Environment`."""
        began = time.perf_counter()
        try:
            return self._environment.replies(turns, max_calls)
        finally:
            self._stopwatch.seconds += time.perf_counter() - began
