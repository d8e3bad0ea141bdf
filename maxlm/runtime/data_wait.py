"""The wait for a batch, as far as the device had nothing to do meanwhile."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeVar

from maxlm.runtime.timeline import Timeline

# Fetching a batch that is ready takes less.
_LATE_SECONDS = 1e-3
_CLOSE_SECONDS = 5.0

Batch = TypeVar('Batch')
# A jax.Array, whose types leave out `is_ready`.
Running = Any


class DataWait:
    """While entered, takes batches from an iterator and has a timeline tell what that held up.

    A device that still works on the step before loses nothing by a batch that is late. When it became idle is seen by a
    thread as long as batches come too late. Otherwise it is let alone: on a CPU, waking it would hold up the steps. The
    first batch that comes too late finds a step that has just begun, and that takes as long as those before.
    """

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._queue: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        # What became ready last, and when.
        self._ready: tuple[Running | None, float] = None, 0.0
        self._too_late = False
        self._asked: float | None = None
        # From one batch to the next, as long as they came in time.
        self._steps: deque[float] = deque(maxlen=8)
        self._thread = threading.Thread(target=self._watch, daemon=True, name='data-wait')

    def __enter__(self) -> DataWait:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        # Python aborts when it ends while a thread is in JAX. A device that is stuck must not hold up the end for ever.
        self._thread.join(_CLOSE_SECONDS)

    def take(self, batches: Iterator[Batch], running: Running | None) -> tuple[Batch, float]:
        """The next batch, and the seconds that it took to come, in which the device may have been busy.

        Args:
            batches: where it comes from. What that raises is raised here.
            running: a result of the step that was dispatched last; None = there is none on its way.
        """
        asked = self._timeline.now()
        if self._asked is not None and not self._too_late:
            self._steps.append(asked - self._asked)
        self._asked = asked
        busy = running is not None and not running.is_ready()
        watched = busy and self._too_late
        if watched:
            self._queue.put(running)
        with self._timeline.phase('data_wait'):
            batch = next(batches)
        came = self._timeline.now()
        idle_since = asked
        if running is not None and busy:
            idle_since = self._idle_since(running, asked, came, watched=watched)
            self._timeline.move(idle_since - asked, 'data_wait', 'step')
        self._too_late = came - idle_since > _LATE_SECONDS
        return batch, came - asked

    def _idle_since(self, running: Running, asked: float, came: float, *, watched: bool) -> float:
        """When a device that was busy had nothing to do any more, at the latest now."""
        if watched:
            array, ready = self._ready
            return min(ready, came) if array is running else came
        if not running.is_ready():
            return came
        return min(asked + min(self._steps, default=0.0), came)

    def _watch(self) -> None:
        while (array := self._queue.get()) is not None:
            # Whoever reads the step's metrics hears of what went wrong with it.
            with contextlib.suppress(Exception):
                array.block_until_ready()
            self._ready = array, self._timeline.now()
