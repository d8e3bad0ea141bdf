"""Text of tokens as they come: what can be shown of it, and whether a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.data.tokenizer.tokenizer import Tokenizer

# What stands for bytes that are no UTF-8 (yet).
REPLACEMENT = '�'
# Of the bytes of a character, at most so many can be there without the rest.
MOST_MISSING = 3
# Tokens of the prompt that are decoded along: some tokenizers write a text's first blank only in the middle.
CONTEXT = 4


class TextStream:
    """Text of one continuation. What is shown is never taken back, and all of it is what decoding at once gives.

    Held back is what a later token can still change, the bytes of a character that is not whole, and what may be the
    beginning of a stop string. (Of bytes that are no text at all, tokenizers with byte fallback write replacements for
    valid neighbours too, as soon as the first comes; those that are shown stay.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        """`prompt` is what the continuation follows; `stops` end it and are not part of it."""
        self._decode = tokenizer.decode
        self._stops = tuple(stops)
        # Decoded together: the tokens from `_first` on, whose text up to `_taken` characters was taken.
        self._ids = list(prompt[-CONTEXT:])
        self._first = 0
        self._taken = len(_whole(self._decode(self._ids)))
        self._held = ''
        # Tokens since the text ended with whole characters.
        self._missing = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Text that can be shown now; empty once a stop string has come."""
        self._ids.append(token)
        return self._show(final=False)

    def finish(self) -> str:
        """The rest, of a continuation that has ended without a stop string."""
        return '' if self.stopped else self._show(final=True)

    def _show(self, *, final: bool) -> str:
        if self.stopped:
            return ''
        text = self._decode(self._ids[self._first :])
        self._missing = self._missing + 1 if text.endswith(REPLACEMENT) else 0
        if final or not self._missing:
            whole = text
        else:
            whole = _whole(text) if self._missing > MOST_MISSING else text[: self._taken]
        self._held += whole[self._taken :]
        self._taken = max(self._taken, len(whole))
        if len(whole) == len(text) and len(self._ids) - self._first > 2 * CONTEXT:
            # From now on without the tokens whose text stands; unless they begin inside a character.
            rest = self._decode(self._ids[-CONTEXT:])
            if text.endswith(rest):
                self._first, self._taken = len(self._ids) - CONTEXT, len(rest)
        ends = [place for place in map(self._held.find, self._stops) if place >= 0]
        if ends:
            self.stopped = True
            return self._held[: min(ends)]
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


def _whole(text: str) -> str:
    """Without the end that may be a part of a character."""
    stripped = text.rstrip(REPLACEMENT)
    return text[: max(len(stripped), len(text) - MOST_MISSING)]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop string begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
