"""Stop requests: the machine is going away, or the user has pressed Ctrl-C."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """While entered, the first SIGTERM or SIGINT only raises the flag `requested`; the loop saves and leaves.

    A second SIGINT interrupts at once. A second SIGTERM changes nothing: the save that is under way goes on.

    Of several processes one may be told and the others not, and their loops are not at the same step. Then JAX's
    preemption service finds a step that none of them has passed. It works in threads of its own: a step asks it for a
    number in memory, while a flag that all agree on by a collective would cost every step a round trip. It listens to
    SIGTERM only, and by its own handler, so SIGINT and notices are passed on as one.
    """

    def __init__(self) -> None:
        self.requested = ''  # the signal's name, or what a notice said
        self._was_signalled = False
        self._num_checks = 0
        self._is_multiprocess = jax.process_count() > 1
        # Signal number → handler before; Python types a handler in several ways.
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT,) if self._is_multiprocess else (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self, reason: str) -> None:
        """Asks for the stop in words, from any thread: what came over the network instead of as a signal."""
        if self.requested:
            return
        self.requested = reason
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self) -> bool:
        """Returns whether to stop now, the same in all processes; each calls it once after every step."""
        if not self._is_multiprocess:
            return bool(self.requested)
        # Not the number of the step: a run that goes back would ask for the same again.
        self._num_checks += 1
        if not multihost_utils.reached_preemption_sync_point(self._num_checks):
            return False
        self.requested = self.requested or 'SIGTERM in one of the processes'
        return True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # After a notice the first Ctrl-C is still a first one.
        if number == signal.SIGINT and self._was_signalled:
            raise KeyboardInterrupt
        self._was_signalled = True
        self.requested = self.requested or signal.Signals(number).name
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)


def ignore_sigterm() -> None:
    """For a process that has saved, or done all, and is about to end with its exit code.

    To take down JAX lasts a second or two. Another SIGTERM would make a death by signal of it, which whoever started
    the run takes for a crash.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
