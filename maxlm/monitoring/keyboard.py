"""Reads single key presses from a terminal, and always restores its settings."""

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

# Signals that end the program after the terminal is restored.
_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Quit(Exception):  # noqa: N818 - not an error
    """The user or the system requested that the program ends."""


class Keys:
    """Key presses of a terminal; none without a terminal."""

    def __init__(self, terminal: int | None):
        """Stores the file descriptor of the terminal; None: there is no terminal."""
        self._terminal = terminal

    def read_key(self, seconds: float) -> str:
        """Returns a key that is pressed within `seconds` seconds, or ''.

        An escape sequence, e.g. of an arrow key, is one key.

        Raises:
            Quit: the terminal was closed.
        """
        files = [] if self._terminal is None else [self._terminal]
        ready, _, _ = select.select(files, [], [], seconds)
        if not ready:
            return ''
        try:
            data = os.read(ready[0], 16)
        except OSError:
            data = b''
        if not data:
            raise Quit
        return data.decode(errors='replace')


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Disables echo and line buffering of the terminal, and makes signals that end the program raise `Quit`."""
    terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
    settings = None if terminal is None else termios.tcgetattr(terminal)
    previous_handlers = {number: signal.signal(number, _quit) for number in _QUIT_SIGNALS}
    # Ignore Ctrl-Z, because a stopped process would leave the terminal in this mode.
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
