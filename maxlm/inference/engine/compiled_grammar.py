"""Compiled grammars, whose processes compute the token masks of all samples with the same grammar.

Shapes: W words of 32 tokens each.
"""

from __future__ import annotations

import collections
import math
import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from maxlm.errors import InputError
from maxlm.sandbox.limited_process import LimitedProcess, LimitError, ProcessKilledError

# Time for one mask, on a machine that is busy with other processes.
MASK_WALL_SECONDS = 20.0
# Maximum number of samples of one request, and size of the length of each result.
MAX_BATCH, SIZE_BYTES = 16, 4
# Maximum number of forced tokens per result.
MAX_FORCED = 32
# Maximum number of tokens that are sampled with a mask in addition to its own, see `TokenMatcher.num_predicted`.
MAX_PREDICTED = 7
# State after a token: more tokens follow; the text is complete; no token may follow.
CONTINUES, COMPLETE, DEAD_END = b'+', b'.', b'!'
# Maximum time for which the engine waits for masks if no sample has one. It then checks for new requests.
IDLE_SECONDS = 0.01
# Minimum time for which samples with a mask wait for the masks of others.
MIN_MASK_SECONDS = 0.002
# A word of a mask that allows all of its tokens.
ALL_TOKENS = np.int32(-1)
# Beginning of the errors of grammars that exceed a limit.
TOO_COMPLEX = 'the schema is too complex'


def num_words(num_ids: int) -> int:
    """Returns W, the number of words of a mask."""
    return -(-num_ids // 32)


class MaskResult(NamedTuple):
    """Result of the process for new tokens of one text.

    Attributes:
        num_accepted: number of the tokens that count.
        forced: tokens that must follow.
        state: state after all these tokens: `CONTINUES` and the next mask, `COMPLETE`, or `DEAD_END` and the reason.
    """

    num_accepted: int
    forced: tuple[int, ...]
    state: bytes

    def to_bytes(self) -> bytes:
        """Returns the numbers of accepted and forced tokens, the latter in int32, and the state."""
        header = bytes([self.num_accepted, len(self.forced)])
        return header + np.array(self.forced, np.int32).tobytes() + self.state

    @classmethod
    def from_bytes(cls, data: bytes) -> MaskResult:
        """Reads the bytes of a result."""
        end = 2 + 4 * data[1]
        return cls(data[0], tuple(np.frombuffer(data[2:end], np.int32).tolist()), data[end:])


class CompiledGrammar:
    """A compiled grammar, and the process that knows the positions of samples in it. Only one thread uses its samples.

    Attributes:
        first_mask: tokens that may begin a text, as bits of int32 [W].
        num_bytes: memory of the process at the beginning.
        error: reason why the process has ended, or ''.
    """

    def __init__(
        self, process: LimitedProcess, first_mask: np.ndarray, num_bytes: int, on_failure: Callable[[str], None]
    ):
        """Initializes the grammar. `on_failure` is called with the reason if a limit is exceeded."""
        self.first_mask, self.num_bytes, self.error = first_mask, num_bytes, ''
        self._process, self._on_failure = process, on_failure
        # Samples with new tokens, and the samples of each request without a result.
        self._tokens: list[tuple[str, TokenMatcher]] = []
        self._requests: collections.deque[list[TokenMatcher]] = collections.deque()
        # Samples that have ended since the last request.
        self._ended: list[int] = []
        self._deadline = 0.0
        self._num_started = self._num_open = 0

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        try:
            # Without a request, only the end of the process can be read.
            return not self.error and (bool(self._requests) or not self._process.has_result())
        except (LimitError, ValueError):
            # Another thread may close the socket at the same time, whose descriptor is then invalid.
            return False

    def start(self) -> TokenMatcher:
        """Returns a matcher at the beginning of a text."""
        self._num_started += 1
        self._num_open += 1
        return TokenMatcher(self, self._num_started)

    def add(self, tokens: Sequence[int], matcher: TokenMatcher, *, is_truncated: bool) -> None:
        """Adds the next tokens of a sample to the next request."""
        self._tokens.append((' '.join(map(str, (matcher.number, int(is_truncated), *tokens))), matcher))

    def send(self) -> None:
        """Sends the new tokens of all samples. `poll` gives the results to the matchers."""
        while self._tokens and not self.error:
            batch, self._tokens = self._tokens[:MAX_BATCH], self._tokens[MAX_BATCH:]
            request = ';'.join([f'N{" ".join(map(str, self._ended))}', *(tokens for tokens, _ in batch)])
            self._ended.clear()
            if not self._requests:
                self._deadline = time.monotonic() + MASK_WALL_SECONDS
            self._requests.append([matcher for _, matcher in batch])
            try:
                self._process.send(request.encode())
            except LimitError as error:
                self._fail(error)

    def poll(self) -> None:
        """Reads the results that have arrived. Kills the process if one takes too long."""
        try:
            while self._requests and not self.error:
                if not self._process.has_result():
                    if time.monotonic() > self._deadline:
                        raise LimitError(f'takes more than {MASK_WALL_SECONDS:g} s')
                    return
                result = self._process.result()
                self._deadline = time.monotonic() + MASK_WALL_SECONDS
                start = 0
                for matcher in self._requests.popleft():
                    end = start + int.from_bytes(result[start : start + SIZE_BYTES]) + SIZE_BYTES
                    matcher.receive(MaskResult.from_bytes(result[start + SIZE_BYTES : end]))
                    start = end
        except (LimitError, InputError) as error:
            self._fail(error)

    def release(self, matcher: TokenMatcher) -> None:
        """Ends a sample. Kills the process if it works for this sample only."""
        self._num_open -= 1
        self._tokens = [pair for pair in self._tokens if pair[1] is not matcher]
        if self.error or matcher.mask is self.first_mask:
            return
        if matcher.is_waiting and not self._num_open:
            self.error = 'the request was cancelled'
            self._process.close()
            return
        self._ended.append(matcher.number)

    def fileno(self) -> int:
        """Returns the descriptor that is readable if a result has arrived."""
        return self._process.fileno()

    def _fail(self, error: Exception) -> None:
        self._process.close()
        if isinstance(error, ProcessKilledError):
            self.error = f'the process of the grammar {error}; send the request again'
        else:
            self.error = f'{TOO_COMPLEX} to continue the response: the next token {error}; simplify it'
            self._on_failure(self.error)
        for matchers in self._requests:
            for matcher in matchers:
                matcher.fail(self.error)
        self._requests.clear()


class TokenMatcher:
    """Position of one text in a grammar.

    Attributes:
        number: number of the text.
        forced: tokens that must follow.
        mask: tokens that may follow the forced ones, as bits of int32 [W]; None while the process computes it, and
            after the end.
        num_predicted: number of tokens to sample with the mask in addition to its own, because the next mask may be
            equal, such as within a string. The process finds out how many of them count.
        num_accepted: number of the last tokens that count.
        is_complete: True if the text follows the grammar and no token may follow.
        failure: reason why the text cannot be completed, or ''.
        sent: time of the last token.
    """

    def __init__(self, grammar: CompiledGrammar, number: int):
        self.grammar, self.number = grammar, number
        self.forced: Sequence[int] = ()
        self.mask: np.ndarray | None = grammar.first_mask
        self.num_predicted = self.num_accepted = 0
        self.is_complete = False
        self.failure = ''
        self.sent = 0.0
        self._last_mask, self._num_sent = grammar.first_mask, 0
        # The last mask that was equal to the one before.
        self._kept_mask: np.ndarray | None = None

    @property
    def is_waiting(self) -> bool:
        """True if the result for the last tokens has not arrived."""
        return self.mask is None and not self.is_complete and not self.failure

    def accept(self, tokens: Sequence[int], *, is_truncated: bool = False) -> None:
        """Adds tokens that were sampled with the mask, one at least, to the text and its forced tokens.

        The other attributes are known when `is_waiting` becomes False.

        Args:
            tokens: the tokens.
            is_truncated: top-k, top-p or min-p truncates their distribution.
        """
        assert not self.forced, 'the forced tokens precede'
        assert self.mask is not None, 'its mask allows the first token'
        self._last_mask, self.mask = self.mask, None
        self._num_sent, self.num_accepted = len(tokens), 1
        self.sent = time.monotonic()
        if self.grammar.error:
            self.failure = self.grammar.error
        else:
            self.grammar.add(tokens, self, is_truncated=is_truncated)

    def receive(self, result: MaskResult) -> None:
        """Updates the attributes from a result of the process."""
        self.num_accepted, self.forced = result.num_accepted, result.forced
        state, data = result.state[:1], result.state[1:]
        if state == CONTINUES:
            self.mask = np.frombuffer(data, np.int32)
            if self._num_sent != self.num_accepted:
                self.num_predicted = 0
            # The next mask is probably equal again, and so are those of later strings.
            if any(mask is not None and np.array_equal(self.mask, mask) for mask in (self._last_mask, self._kept_mask)):
                self._kept_mask = self.mask
                self.num_predicted = min(2 * self.num_predicted + 1, MAX_PREDICTED)
            else:
                self.num_predicted = 0
        elif state == COMPLETE:
            self.is_complete = True
        else:
            self.failure = data.decode()

    def fail(self, reason: str) -> None:
        """Ends the text without a result of the process."""
        if self.is_waiting:
            self.failure = reason

    def close(self) -> None:
        """Ends the text. Must be called once."""
        self.grammar.release(self)


def wait_for_masks(matchers: Collection[TokenMatcher], delay: float | None) -> None:
    """Waits for the masks of texts.

    Args:
        matchers: the texts.
        delay: maximum number of seconds since the last token of a text; None = up to `IDLE_SECONDS`, until any mask
            arrives.
    """
    end = time.monotonic() + IDLE_SECONDS
    while True:
        waiting = [matcher for matcher in matchers if matcher.is_waiting]
        for matcher in waiting:
            matcher.grammar.send()
        for grammar in {matcher.grammar for matcher in waiting}:
            grammar.poll()
            if grammar.error:
                for matcher in waiting:
                    if matcher.grammar is grammar:
                        matcher.fail(grammar.error)
        left = [matcher for matcher in waiting if matcher.is_waiting]
        if delay is None and len(left) < len(waiting):
            # Texts with a mask do not wait for slower ones much longer.
            delay = MIN_MASK_SECONDS
        until = end if delay is None else max((matcher.sent + delay for matcher in left), default=0.0)
        remaining = until - time.monotonic()
        if not left or remaining <= 0:
            return
        poll = select.poll()
        for grammar in {matcher.grammar for matcher in left}:
            poll.register(grammar.fileno(), select.POLLIN)
        poll.poll(math.ceil(1000 * remaining))
