"""Incremental detokenization with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.data.tokenizer.tokenizer import Tokenizer

# Character that replaces invalid or incomplete UTF-8.
REPLACEMENT = '�'
# Maximum number of bytes of an incomplete UTF-8 character.
MAX_PENDING_BYTES = 3
# Prompt tokens that are decoded as context: some tokenizers drop a leading space at the start of a text.
NUM_CONTEXT_TOKENS = 4


class TextStream:
    """Incremental text of one continuation.

    Returned text is never revised, and its concatenation equals decoding all tokens at once. The stream withholds
    the bytes of an incomplete character and text that may be the start of a stop string.

    For invalid UTF-8, tokenizers with byte fallback also replace valid neighboring bytes. Characters that were
    returned before the invalid byte are not revised.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        """Initializes the stream.

        Args:
            tokenizer: tokenizer of the model.
            prompt: token ids before the continuation.
            stops: strings that end the continuation. They are not part of its text.
        """
        self._decode = tokenizer.decode
        self._stops = tuple(stops)
        # Tokens from `_first_token` on are decoded together; the first `_num_chars_read` characters were returned.
        self._ids = list(prompt[-NUM_CONTEXT_TOKENS:])
        self._first_token = 0
        self._num_chars_read = len(_complete_prefix(self._decode(self._ids)))
        self._withheld = ''
        # Number of tokens since the text last ended with a complete character.
        self._num_incomplete = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns the new text; empty once a stop string has occurred."""
        self._ids.append(token)
        return self._read_new(final=False)

    def finish(self) -> str:
        """Returns the withheld text of a continuation that ended without a stop string."""
        return '' if self.stopped else self._read_new(final=True)

    def _read_new(self, *, final: bool) -> str:
        if self.stopped:
            return ''
        text = self._decode(self._ids[self._first_token :])
        self._num_incomplete = self._num_incomplete + 1 if text.endswith(REPLACEMENT) else 0
        if final or not self._num_incomplete:
            complete = text
        else:
            complete = (
                _complete_prefix(text) if self._num_incomplete > MAX_PENDING_BYTES else text[: self._num_chars_read]
            )
        self._withheld += complete[self._num_chars_read :]
        self._num_chars_read = max(self._num_chars_read, len(complete))
        if len(complete) == len(text) and len(self._ids) - self._first_token > 2 * NUM_CONTEXT_TOKENS:
            # Drop old tokens to keep decoding cheap, unless the shorter context starts inside a character.
            rest = self._decode(self._ids[-NUM_CONTEXT_TOKENS:])
            if text.endswith(rest):
                self._first_token, self._num_chars_read = len(self._ids) - NUM_CONTEXT_TOKENS, len(rest)
        matches = [index for index in map(self._withheld.find, self._stops) if index >= 0]
        if matches:
            self.stopped = True
            return self._withheld[: min(matches)]
        num_withheld = 0 if final else max((_stop_overlap(self._withheld, stop) for stop in self._stops), default=0)
        output, self._withheld = (
            self._withheld[: len(self._withheld) - num_withheld],
            self._withheld[len(self._withheld) - num_withheld :],
        )
        return output


def _complete_prefix(text: str) -> str:
    """Returns the text without a trailing incomplete character."""
    stripped = text.rstrip(REPLACEMENT)
    return text[: max(len(stripped), len(text) - MAX_PENDING_BYTES)]


def _stop_overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of the text that is a prefix of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
