"""One sample of a request, while it grows and when it is whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from maxlm.inference.requests import Completion, Delta, DrawnToken, Finish, Request
from maxlm.inference.slots import Slot
from maxlm.inference.text import TextStream


@dataclasses.dataclass(eq=False)
class Continuation:
    """One continuation of a request, from its submission to its end."""

    request: Request
    number: int
    listener: Callable[[Delta], None]
    text: TextStream
    slot: Slot | None = None
    # Until its first chunk is on its way: the slot that it takes keys and values over from, and of how many tokens.
    source: Slot | None = None
    shared: int = 0
    # Tokens that were asked of the devices, those that came, and the last of these.
    asked: int = 0
    drawn: int = 0
    last: int = 0
    cancelled: bool = False
    finish: Finish | None = None


class Ticket:
    """A submitted request."""

    def __init__(self, samples: Sequence[Continuation], wake: Callable[[], None]):
        """`wake` has the engine look at its samples."""
        self._samples, self._wake = samples, wake

    def cancel(self) -> None:
        """Its samples end at the next step. From any thread; of what has ended nothing changes."""
        for sample in self._samples:
            sample.cancelled = True
        self._wake()


class Collected:
    """The deltas of one sample, put together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[DrawnToken] = []
        self.finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self.finish = delta.finish

    def completion(self) -> Completion:
        assert self.finish is not None, 'a sample ends before the engine has nothing to do'
        return Completion(''.join(self._texts), tuple(self._tokens), self.finish)
