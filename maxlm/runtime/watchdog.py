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
LONGEST_TICK_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Doing:
    """What the main thread is about from one sign of life to the next; each one is told from all others."""

    in_phase: bool = False
    waiting: bool = False


class Watchdog:
    """Between `start` and `finish`, ends the process with exit code 75 when the main thread does no step for too long.

    A process that waits for its devices may wait for another one that is stuck. It leaves that one the time to tell
    where, and ends by itself only when all processes wait: then none of them is at fault.
    """

    def __init__(self, seconds: float, peers: Heartbeats, workdir: Path | None = None):
        """
        Args:
            seconds: without a step, outside of phases; 0 = never mind.
            peers: the other processes.
            workdir: where run.log gets the stacks too.
        """
        self._seconds = seconds
        self._peers = peers
        self._workdir = workdir
        # Only the main thread sets it, as one value: the watching thread never sees half of a change. In a phase until
        # `start`.
        self._doing = _Doing(in_phase=True)
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
        self._peers.set_overdue(False)

    def start(self) -> None:
        """The first step is about to begin."""
        self._doing = _Doing()

    def finish(self) -> None:
        """There will be no more steps. Not called after an error: to clean up after one must not take for ever."""
        self._doing = _Doing(in_phase=True)

    def step_done(self) -> None:
        """There is progress."""
        self._doing = _Doing()

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """What happens inside may take long: compiling, evaluating, saving."""
        self._doing = _Doing(in_phase=True)
        try:
            yield
        finally:
            self._doing = _Doing()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for the devices, and with them for other processes.

        What it waited for has come when it leaves: that is progress, however long it took.
        """
        self._doing = _Doing(waiting=True)
        try:
            yield
        finally:
            self._doing = _Doing()

    def _watch(self) -> None:
        tick = min(self._seconds / TICKS, LONGEST_TICK_SECONDS)
        then = time.monotonic()
        seen, age = self._doing, 0.0
        while not self._stop.wait(tick):
            now = time.monotonic()
            doing = self._doing
            # A process that was suspended has not been stuck.
            age = age + min(now - then, 2 * tick) if doing is seen else 0.0
            then, seen = now, doing
            overdue = age > self._seconds and not doing.in_phase
            self._peers.set_overdue(overdue and doing.waiting)
            # The last look: who has gone on meanwhile is left alone.
            if overdue and (not doing.waiting or self._peers.all_overdue) and self._doing is doing:
                self._give_up(doing)

    def _give_up(self, doing: _Doing) -> None:
        where = 'waiting for its devices' if doing.waiting else 'outside of its devices'
        reason = f'stuck: no step for {self._seconds:g} s (train.hang_timeout_seconds), {where}; start again'
        with contextlib.ExitStack() as stack:
            files = [sys.stderr]
            if self._workdir:
                files.append(stack.enter_context((self._workdir / RUN_LOG).open('a', encoding='utf-8')))
            for file in files:
                print(reason, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
        self._peers.leave(EXIT_PREEMPTED, reason)
