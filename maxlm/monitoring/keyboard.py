"""Keys of a terminal, one at a time as they are pressed; the terminal is as before afterwards, whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

# Signals that end the program with the terminal restored.
_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Quit(Exception):  # noqa: N818 - not an error
    """The user, or the system, wants the program to end."""


class Keys:
    """Keys typed on a terminal; none without a terminal."""

    def __init__(self, terminal: int | None):
        """`terminal` is a file descriptor; None = there is no terminal."""
        self._terminal = terminal

    def read_key(self, seconds: float) -> str:
        """A key that is pressed within so many seconds; '' = none was. Longer sequences, as of arrows, are one key.

        Raises:
            Quit: the terminal is gone.
        """
        files = [] if self._terminal is None else [self._terminal]
        ready, _, _ = select.select(files, [], [], seconds)
        if not ready:
            return ''
        data = os.read(ready[0], 16)
        if not data:
            raise Quit
        return data.decode(errors='replace')


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """While entered, keys are not echoed and need no Enter, and signals that end the program raise `Quit`."""
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
    settings = None if terminal is None else termios.tcgetattr(terminal)
    previous_handlers = {number: signal.signal(number, _quit) for number in _QUIT_SIGNALS}
    # Stopped, it would leave the terminal to the shell as it is.
    previous_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        if terminal is not None:
            tty.setcbreak(terminal)
        yield Keys(terminal)
    finally:
        if terminal is not None and settings is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _quit(number: int, frame: FrameType | None) -> None:
    raise Quit
