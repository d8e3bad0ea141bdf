"""Stop requests: preemption of the machine, a closed terminal, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from maxlm.runtime.termination import signal_reason, termination_signals


class StopRequest:
    """Context in which SIGTERM, SIGINT and SIGHUP only set `requested`. The training loop then saves and exits.

    A second SIGINT raises KeyboardInterrupt. Other second signals are ignored, so the current save continues. SIGHUP
    means that the terminal was closed. It stays ignored if it was, as under `nohup`.

    With several processes, only some may receive the signal, and their loops may be at different steps. JAX's
    preemption service then finds a step that no process has passed. It works in background threads, so a step only
    reads a number in memory. A collective would cost every step a round trip. The service handles only SIGTERM, so
    other signals and maintenance events are forwarded as SIGTERM.
    """

    def __init__(self) -> None:
        self.requested = ''  # name of the signal, or message of a maintenance event
        self._was_signalled = False
        self._num_checks = 0
        self._is_multiprocess = jax.process_count() > 1
        # Signal number → previous handler. Python declares several types of handlers.
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread receives signals. The run of another thread can still be stopped by `request`.
            return self
        for number in (signal.SIGINT, *termination_signals()):
            if self._is_multiprocess and number == signal.SIGTERM:
                continue
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self, reason: str) -> None:
        """Requests a stop with a reason, from any thread, for example after a maintenance event."""
        if self.requested:
            return
        self.requested = reason
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self) -> bool:
        """Returns True if the run must stop now, the same in all processes. Each calls it once after every step."""
        if not self._is_multiprocess:
            return bool(self.requested)
        # Counts checks instead of steps, because a run that rolls back would use a step number twice.
        self._num_checks += 1
        if not multihost_utils.reached_preemption_sync_point(self._num_checks):
            return False
        self.requested = self.requested or 'SIGTERM in one of the processes'
        return True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # The first Ctrl-C after a maintenance event still counts as the first.
        if number == signal.SIGINT and self._was_signalled:
            raise KeyboardInterrupt
        self._was_signalled = True
        self.requested = self.requested or signal_reason(number)
        if self._is_multiprocess:
            os.kill(os.getpid(), signal.SIGTERM)
