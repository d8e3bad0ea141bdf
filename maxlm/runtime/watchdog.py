"""Hang timeout: detects that a run makes no progress, logs all stacks and exits so that the run can be restarted."""

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
    """Activity of the main thread since its last progress. Compared by identity."""

    in_phase: bool = False
    is_waiting: bool = False


class Watchdog:
    """Exits the process with code 75 if the main thread completes no step for too long between `start` and `finish`.

    A process that waits for its devices may wait for another process that is stuck. The stuck process then reports its
    stacks. A waiting process exits by itself only if all processes wait, because then no single process is stuck.
    """

    def __init__(self, seconds: float, heartbeats: Heartbeats, workdir: Path | None = None):
        """
        Args:
            seconds: timeout without a step, outside of phases; 0 = no timeout.
            heartbeats: heartbeats of all processes.
            workdir: workdir whose run.log also receives the stacks.
        """
        self._seconds = seconds
        self._heartbeats = heartbeats
        self._workdir = workdir
        # Only the main thread replaces it, as one value, so that the watching thread sees consistent fields. It starts
        # in a phase, until `start`.
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
        """Starts the timeout before the first step."""
        self._activity = _Activity()

    def finish(self) -> None:
        """Stops the timeout after the last step. Not called after an error, so that the cleanup has a timeout too."""
        self._activity = _Activity(in_phase=True)

    def step_done(self) -> None:
        """Records progress."""
        self._activity = _Activity()

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """Suspends the timeout for long operations: compilation, evaluation, saving."""
        self._activity = _Activity(in_phase=True)
        try:
            yield
        finally:
            self._activity = _Activity()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks that the main thread waits for the devices, and thereby for other processes.

        The end of the wait counts as progress, regardless of its duration.
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
            # Limits the increment, because a process that was suspended was not stuck.
            age = age + min(now - then, 2 * tick) if activity is last_activity else 0.0
            then, last_activity = now, activity
            overdue = age > self._seconds and not activity.in_phase
            self._heartbeats.set_overdue(overdue and activity.is_waiting)
            # Checks again, because the main thread may have made progress since.
            if overdue and (not activity.is_waiting or self._heartbeats.all_overdue) and self._activity is activity:
                self._abort(activity)

    def _abort(self, activity: _Activity) -> None:
        where = 'waiting for the devices' if activity.is_waiting else 'in host code'
        reason = f'stuck: no step for {self._seconds:g} s (train.hang_timeout_seconds), {where}; restart the run'
        with contextlib.ExitStack() as stack:
            files = [sys.stderr]
            if self._workdir:
                files.append(stack.enter_context((self._workdir / RUN_LOG).open('a', encoding='utf-8')))
            for file in files:
                print(reason, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
        self._heartbeats.exit_all(EXIT_PREEMPTED, reason)
