"""Being told to stop: the machine is going away, or the user has pressed Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """While entered, the first SIGTERM or SIGINT only raises the flag `requested`; the loop saves and leaves.

    A second SIGINT interrupts at once. A second SIGTERM changes nothing: the save that is under way goes on.
    """

    def __init__(self) -> None:
        self.requested = ''  # the signal's name
        # Signal number → handler before; Python types a handler in several ways.
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
