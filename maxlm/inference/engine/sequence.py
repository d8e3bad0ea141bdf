"""One sample of a request, while it grows and when it is whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.requests import Completion, Delta, DrawnToken, Finish, Request
from maxlm.inference.engine.slots import Slot


@dataclasses.dataclass(eq=False)
class ActiveSequence:
    """One continuation of a request, from its submission to its end."""

    request: Request
    number: int
    listener: Callable[[Delta], None]
    text: TextStream
    slot: Slot | None = None
    # Tokens that were asked of the devices, those that came, and the last of these.
    asked: int = 0
    drawn: int = 0
    last: int = 0
    cancelled: bool = False
    finish: Finish | None = None

    def take(self, tokens: Iterable[DrawnToken], ends: Container[int]) -> Delta:
        """What tokens that were drawn add to it; behind one that ends it there are none.

        Args:
            tokens: that came, in order.
            ends: ids that end a text, where the request does not ignore them.
        """
        assert self.slot is not None, 'a sample that draws has a slot'
        told: list[DrawnToken] = []
        text = ''
        for token in tokens:
            if self.drawn:
                # It went through the model to give this token.
                self.slot.content.append(self.last)
            self.drawn += 1
            if token.id in ends and not self.request.ignore_ends:
                return Delta(self.number, text + self.text.finish(), tuple(told), 'stop')
            self.last = token.id
            told.append(token)
            text += self.text.add(token.id)
            if self.text.stopped:
                return Delta(self.number, text, tuple(told), 'stop')
            if self.drawn == self.request.max_tokens:
                return Delta(self.number, text + self.text.finish(), tuple(told), 'length')
        return Delta(self.number, text, tuple(told), None)


class RequestHandle:
    """A submitted request."""

    def __init__(self, samples: Sequence[ActiveSequence], wake: Callable[[], None]):
        """`wake` has the engine look at its samples."""
        self._samples, self._wake = samples, wake

    def cancel(self) -> None:
        """Its samples end at the next step. From any thread; of what has ended nothing changes."""
        for sample in self._samples:
            sample.cancelled = True
        self._wake()


class FinishedRequest:
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


def drawn_tokens(request: Request, found: Sequence[np.ndarray]) -> Iterator[DrawnToken]:
    """Those of one row, [N] and [N, C]: ids and log-probabilities, then the likeliest where any request wants them."""
    num = request.top_log_probs or 0
    for token, log_prob, *tops in zip(*(x.tolist() for x in found), strict=True):
        top = tuple(zip(*(values[:num] for values in tops), strict=True)) if num else ()
        yield DrawnToken(token, math.nan if request.top_log_probs is None else log_prob, top)
