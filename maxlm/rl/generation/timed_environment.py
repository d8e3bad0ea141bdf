"""Measures the time for which generation waits for an environment, such as the tools of a rollout."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from maxlm.rl.generation.tool_environment import Reply, TurnReplies


@dataclasses.dataclass
class Stopwatch:
    """Seconds that were measured so far."""

    seconds: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Adds the seconds of the context, also if it raises an exception."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


class TimedEnvironment:
    """An environment whose replies are timed."""

    def __init__(self, environment: TurnReplies, stopwatch: Stopwatch):
        """`stopwatch` receives the seconds of each call."""
        self._environment, self._stopwatch = environment, stopwatch

    def replies(
        self, rows: Sequence[int], turns: Sequence[Sequence[int]], max_calls: Sequence[int]
    ) -> list[Reply | None]:
        """See `TurnReplies`."""
        with self._stopwatch.running():
            return self._environment.replies(rows, turns, max_calls)
