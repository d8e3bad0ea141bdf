"""Seconds of a process by category; its main thread is always in exactly one of `goodput.ACTIVITIES`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from maxlm.telemetry.goodput import ACTIVITIES

# What JAX spends on a new program besides tracing: both are over before the next begins, so nothing counts twice.
_COMPILING = ('/jax/core/compile/jaxpr_to_mlir_module_duration', '/jax/core/compile/backend_compile_duration')


class Timeline:
    """Seconds by category. Their sum is the time since `start_time`, by construction.

    The main thread enters phases; any thread may read. Until the first step what is in no phase is `start`, and `other`
    afterwards.
    """

    def __init__(self, start_time: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        """
        Args:
            start_time: when the process started, in seconds since 1970 (see `process_start_time`); None = now.
            clock: seconds.
        """
        now = time.time()
        self._clock = clock
        self.start_time = now if start_time is None else min(start_time, now)
        # The same moment on the clock.
        self.origin = self._last_counted = clock() - (now - self.start_time)
        self._category = 'start'
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._lock = threading.Lock()

    def now(self) -> float:
        """What the clock says."""
        return self._clock()

    def read(self) -> dict[str, float]:
        """Seconds by category until now."""
        with self._lock:
            self._accumulate()
            return dict(self._seconds)

    @contextlib.contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """What happens inside is of one category, but for phases within it."""
        before = self._switch_category(category)
        try:
            yield
        finally:
            self._switch_category(before)

    def started(self) -> None:
        """The process has begun to train: what is in no phase from now on is `other`. Not to be called in a phase."""
        self._switch_category('other')

    def move(self, seconds: float, source: str, target: str) -> None:
        """So much of what counted as one category was another one."""
        with self._lock:
            self._accumulate()
            seconds = max(0.0, min(seconds, self._seconds[source]))
            self._seconds[source] -= seconds
            self._seconds[target] += seconds

    @contextlib.contextmanager
    def track_compilation(self) -> Iterator[None]:
        """While entered, what this thread compiles counts as `compile`, in whatever phase that happens."""
        thread = threading.get_ident()

        # The names are those that JAX calls by.
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
            # A mistyped name fails here and not when it is left.
            assert category in self._seconds, category
            return before

    def _accumulate(self) -> None:
        now = self._clock()
        self._seconds[self._category] += now - self._last_counted
        self._last_counted = now


def process_start_time() -> float:
    """When this process did, in seconds since 1970: before its interpreter started and imported anything."""
    try:
        # Behind the name, which may hold spaces and parentheses; see proc(5).
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf('SC_CLK_TCK')
    except (OSError, AttributeError):
        # Not on Linux, where psutil would be wrong by up to a second.
        import psutil

        return float(psutil.Process().create_time())
    return time.time() - max(0.0, age)
