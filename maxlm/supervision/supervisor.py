"""Runs a command repeatedly until it succeeds."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from maxlm.config.serialization import public_command
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, InputError
from maxlm.runtime.termination import signal_reason, termination_signals
from maxlm.supervision.restarts import Policy, RestartHistory, newest_step, next_action

# Maximum delay until a pause reacts to a signal.
TICK_SECONDS = 0.1


class Supervisor:
    """Runs one command repeatedly and forwards the first SIGTERM, SIGINT or SIGHUP to it as SIGTERM."""

    def __init__(self, command: Sequence[str], policy: Policy):
        self._command = list(command)
        self._policy = policy
        self._pid = 0
        self._signal = ''

    @property
    def is_stopped(self) -> bool:
        """Returns True if a signal has asked the supervisor to stop."""
        return bool(self._signal)

    def run(self) -> int:
        """Runs the command until `next_action` or a signal ends the loop; returns the exit code of the loop.

        Raises:
            InputError: the command cannot be started.
        """
        numbers = (signal.SIGINT, *termination_signals())
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            return self._supervise()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _supervise(self) -> int:
        history = RestartHistory(newest_step(self._policy.workdir), 0, self._policy.backoff)
        while not self._signal:
            code = self._run_once()
            if self._was_stopped(code):
                return code
            decision, history = next_action(self._policy, history, code, newest_step(self._policy.workdir))
            if decision.text:
                report(decision.text)
            if decision.code is not None:
                return decision.code
            end = time.monotonic() + decision.pause
            while not self._signal and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, TICK_SECONDS))
        return EXIT_PREEMPTED

    def _was_stopped(self, code: int) -> bool:
        """Returns True and prints a message if the command ended because of a signal to the supervisor."""
        if not self._signal or code in (EXIT_DONE, EXIT_BAD_INPUT):
            return False
        report(f'stopped by {self._signal}; the command ended with exit code {code}')
        return True

    def _run_once(self) -> int:
        self._start({})
        # As process 1 of a container, this process also inherits orphans and has to reap them.
        while (code := self._reap(0)) is None:
            pass
        return code

    def _start(self, variables: Mapping[str, str]) -> None:
        """Starts the command with additional environment variables."""
        self._pid = self._spawn({**os.environ, **variables})
        if self._signal:
            # The signal arrived before the process ID was known.
            self._terminate()

    def _spawn(self, environment: Mapping[str, str]) -> int:
        # Python ignores these signals; the command inherits their default action.
        default = (signal.SIGPIPE, signal.SIGXFSZ)
        try:
            return os.posix_spawnp(self._command[0], self._command, environment, setsigdef=default)
        except OSError as error:
            raise InputError(
                f'{shlex.join(public_command(self._command))}: cannot be started: {error.strerror}; check the command'
            ) from error

    def _reap(self, options: int) -> int | None:
        """Reaps one process. Returns the exit code of the command, or None if it is still running.

        Args:
            options: options of `os.waitpid`, such as WNOHANG.
        """
        pid, status = os.waitpid(-1, options)
        if pid != self._pid:
            return None
        self._pid = 0
        code = os.waitstatus_to_exitcode(status)
        # The convention of shells for a process that was killed by a signal.
        return 128 - code if code < 0 else code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal:
            return
        self._signal = signal_reason(number)
        # SIGINT is forwarded as SIGTERM: a terminal sends Ctrl-C to the command too, and a second SIGINT would
        # interrupt the save that the first one requested.
        self._terminate()

    def _terminate(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def report(text: str) -> None:
    """Prints a message of the supervisor."""
    print(f'supervise: {text}', file=sys.stderr, flush=True)
