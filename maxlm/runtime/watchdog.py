"""The hang timeout: notices that a run makes no progress, logs all stacks, and ends it so that it can start again."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maxlm.errors import EXIT_PREEMPTED
from maxlm.log import RUN_LOG
from maxlm.runtime.heartbeat import Heartbeats

TICKS = 10
MAX_TICK_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Activity:
    """Activity of the main thread between two signs of progress; compared by identity."""

    in_phase: bool = False
    is_waiting: bool = False


class Watchdog:
    """Between `start` and `finish`, ends the process with exit code 75 when the main thread does no step for too long.

    A process that waits for its devices may wait for another one that is stuck. It leaves that one the time to tell
    where, and ends by itself only when all processes wait: then none of them is at fault.
    """

    def __init__(self, seconds: float, heartbeats: Heartbeats, workdir: Path | None = None):
        """
        Args:
            seconds: without a step, outside of phases; 0 = never mind.
            heartbeats: of all processes.
            workdir: where run.log gets the stacks too.
        """
        self._seconds = seconds
        self._heartbeats = heartbeats
        self._workdir = workdir
        # Only the main thread sets it, as one value: the watching thread never sees half of a change. In a phase until
        # `start`.
        self._activity = _Activity(in_phase=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name='watchdog')

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._seconds:
            self._thread.join()
        self._heartbeats.set_overdue(False)

    def start(self) -> None:
        """The first step is about to begin."""
        self._activity = _Activity()

    def finish(self) -> None:
        """There will be no more steps. Not called after an error: to clean up after one must not take for ever."""
        self._activity = _Activity(in_phase=True)

    def step_done(self) -> None:
        """There is progress."""
        self._activity = _Activity()

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """What happens inside may take long: compiling, evaluating, saving."""
        self._activity = _Activity(in_phase=True)
        try:
            yield
        finally:
            self._activity = _Activity()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for the devices, and with them for other processes.

        What it waited for has come when it leaves: that is progress, however long it took.
        """
        self._activity = _Activity(is_waiting=True)
        try:
            yield
        finally:
            self._activity = _Activity()

    def _watch(self) -> None:
        tick = min(self._seconds / TICKS, MAX_TICK_SECONDS)
        then = time.monotonic()
        last_activity, age = self._activity, 0.0
        while not self._stop.wait(tick):
            now = time.monotonic()
            activity = self._activity
            # A process that was suspended has not been stuck.
            age = age + min(now - then, 2 * tick) if activity is last_activity else 0.0
            then, last_activity = now, activity
            overdue = age > self._seconds and not activity.in_phase
            self._heartbeats.set_overdue(overdue and activity.is_waiting)
            # The last check: a process that has gone on meanwhile is left alone.
            if overdue and (not activity.is_waiting or self._heartbeats.all_overdue) and self._activity is activity:
                self._abort(activity)

    def _abort(self, activity: _Activity) -> None:
        where = 'waiting for its devices' if activity.is_waiting else 'outside of its devices'
        reason = f'stuck: no step for {self._seconds:g} s (train.hang_timeout_seconds), {where}; start again'
        with contextlib.ExitStack() as stack:
            files = [sys.stderr]
            if self._workdir:
                files.append(stack.enter_context((self._workdir / RUN_LOG).open('a', encoding='utf-8')))
            for file in files:
                print(reason, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
        self._heartbeats.exit_all(EXIT_PREEMPTED, reason)
