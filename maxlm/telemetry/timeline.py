"""Seconds of a process by category. Its main thread is always in exactly one of `goodput.ACTIVITIES`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from maxlm.telemetry.goodput import ACTIVITIES

# Durations that JAX reports for a new program in addition to tracing. They do not overlap, so no time counts twice.
_COMPILING = ('/jax/core/compile/jaxpr_to_mlir_module_duration', '/jax/core/compile/backend_compile_duration')


class Timeline:
    """Seconds by category, whose sum is the time since `start_time`.

    The main thread enters phases. Any thread may read. Time outside of phases is `start` before the first step, and
    `other` afterwards.
    """

    def __init__(self, start_time: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            start_time: start of the process in seconds since 1970 (see `process_start_time`); None = now.
            clock: returns the time in seconds.
        """
        now = time.time()
        self._clock = clock
        self.start_time = now if start_time is None else min(start_time, now)
        # `start_time` on the clock.
        self.origin = self._last_counted = clock() - (now - self.start_time)
        self._category = 'start'
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._lock = threading.Lock()

    @property
    def is_training(self) -> bool:
        """True during steps and waits for their data; False during compilation, evaluation, saves and rollouts."""
        return self._category in ('step', 'data_wait')

    def now(self) -> float:
        """Returns the time of the clock."""
        return self._clock()

    def read(self) -> dict[str, float]:
        """Returns the seconds by category until now."""
        with self._lock:
            self._accumulate()
            return dict(self._seconds)

    @contextlib.contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """Counts the time in the context as one category, except for nested phases."""
        before = self._switch_category(category)
        try:
            yield
        finally:
            self._switch_category(before)

    def started(self) -> None:
        """Counts the time outside of phases as `other` from now on. Must not be called in a phase."""
        self._switch_category('other')

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves up to `seconds` from one category to another."""
        with self._lock:
            self._accumulate()
            seconds = max(0.0, min(seconds, self._seconds[source]))
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    @contextlib.contextmanager
    def track_compilation(self) -> Iterator[None]:
        """Counts the compilation time of this thread as `compile`, in any phase, while the context is entered."""
        import jax

        thread = threading.get_ident()

        # JAX passes the duration by this keyword.
        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event in _COMPILING and threading.get_ident() == thread:
                self.move(duration_secs, self._category, 'compile')

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    def _switch_category(self, category: str) -> str:
        with self._lock:
            self._accumulate()
            before, self._category = self._category, category
            # A mistyped name fails on entry instead of on exit.
            assert category in self._seconds, category
            return before

    def _accumulate(self) -> None:
        now = self._clock()
        self._seconds[self._category] += now - self._last_counted
        self._last_counted = now


def process_start_time() -> float:
    """Returns the start time of this process in seconds since 1970, before its interpreter started."""
    try:
        # The fields after the process name, which may contain spaces and parentheses; see proc(5).
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf('SC_CLK_TCK')
    except (OSError, AttributeError):
        # This system is not Linux. On Linux, psutil would be wrong by up to a second.
        import psutil

        return float(psutil.Process().create_time())
    return time.time() - max(0.0, age)
