"""One sample of a request, while it is generated and when it is finished."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np

from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.requests import Completion, Delta, FinishReason, GeneratedToken, Request
from maxlm.inference.engine.slots import Slot


@dataclasses.dataclass(eq=False)
class ActiveSequence:
    """One continuation of a request, from its submission to its end."""

    request: Request
    number: int
    listener: Callable[[Delta], None]
    text: TextStream
    slot: Slot | None = None
    # Tokens that were dispatched to the devices, tokens received, and the last of them.
    num_dispatched: int = 0
    num_generated: int = 0
    last_token: int = 0
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None

    def append_tokens(self, tokens: Iterable[GeneratedToken], stop_token_ids: Container[int]) -> Delta:
        """Appends generated tokens, up to one that ends the sequence, and returns the delta.

        Args:
            tokens: that came, in order.
            stop_token_ids: end a text unless the request ignores them.
        """
        assert self.slot is not None, 'a sample that draws has a slot'
        new_tokens: list[GeneratedToken] = []
        text = ''
        for token in tokens:
            if self.num_generated:
                # It went through the model to give this token.
                self.slot.content.append(self.last_token)
            self.num_generated += 1
            if token.id in stop_token_ids and not self.request.ignore_eos:
                return Delta(self.number, text + self.text.finish(), tuple(new_tokens), 'stop')
            self.last_token = token.id
            new_tokens.append(token)
            text += self.text.add(token.id)
            if self.text.stopped:
                return Delta(self.number, text, tuple(new_tokens), 'stop')
            if self.num_generated == self.request.max_tokens:
                return Delta(self.number, text + self.text.finish(), tuple(new_tokens), 'length')
        return Delta(self.number, text, tuple(new_tokens), None)


class RequestHandle:
    """A submitted request."""

    def __init__(self, samples: Sequence[ActiveSequence], wake: Callable[[], None]):
        """`wake` has the engine look at its samples."""
        self._samples, self._wake = samples, wake

    def cancel(self) -> None:
        """Its samples end at the next step. From any thread; of what has ended nothing changes."""
        for sample in self._samples:
            sample.is_cancelled = True
        self._wake()


class FinishedRequest:
    """The deltas of one sample, put together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[GeneratedToken] = []
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self.finish_reason = delta.finish_reason

    def completion(self) -> Completion:
        assert self.finish_reason is not None, 'a sample ends before the engine has nothing to do'
        return Completion(''.join(self._texts), tuple(self._tokens), self.finish_reason)


def generated_tokens(request: Request, arrays: Sequence[np.ndarray]) -> Iterator[GeneratedToken]:
    """Those of one row, [N] and [N, C]: ids and log-probabilities, then the likeliest where any request wants them."""
    num = request.top_log_probs or 0
    for token, log_prob, *top_values in zip(*(x.tolist() for x in arrays), strict=True):
        top = tuple(zip(*(values[:num] for values in top_values), strict=True)) if num else ()
        yield GeneratedToken(token, math.nan if request.top_log_probs is None else log_prob, top)
