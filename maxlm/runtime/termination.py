"""Signals that end a process: SIGTERM, and SIGHUP after its terminal was closed."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from maxlm.errors import EXIT_PREEMPTED, TerminatedError
from maxlm.runtime.console import make_output_optional


def termination_signals() -> tuple[signal.Signals, ...]:
    """Returns SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


def signal_reason(number: int) -> str:
    """Returns the name of a signal, with its cause if that is not obvious."""
    if number != signal.SIGHUP:
        return signal.Signals(number).name
    # The programs that read the output end at the same time.
    make_output_optional()
    return 'SIGHUP (the terminal was closed)'


def exit_on_termination() -> None:
    """Makes the next SIGTERM or SIGHUP end the command with one line and EXIT_PREEMPTED; further ones are ignored.

    The handler raises a TerminatedError, which `exit_code` handles. During imports, an exception would not work:
    extension modules replace it with ImportError, and optional imports suppress it. The handler then exits immediately,
    without closing contexts. During training, `maxlm.runtime.preemption.StopRequest` handles the signals.
    """
    numbers = termination_signals()

    def receive(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        message = f'{signal_reason(number)}: stopped; run the same command again to continue'
        if not _is_importing(frame):
            raise TerminatedError(message)
        # print is not reentrant, and the signal may have interrupted it. The terminal may be closed.
        with contextlib.suppress(OSError):
            os.write(2, f'{message}\n'.encode())
        os._exit(EXIT_PREEMPTED)

    for number in numbers:
        signal.signal(number, receive)


def _is_importing(frame: FrameType | None) -> bool:
    while frame:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            return True
        frame = frame.f_back
    return False
