"""Grammars that restrict generated tokens, such as a JSON schema.

A grammar can take any amount of time and memory. Therefore each one is compiled in a process of its own, with limits,
which also computes the masks of all samples with this grammar: see `grammar_worker`. If a limit is exceeded, the
process is killed, and only these samples fail.

Shapes: W words of 32 tokens each.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import select
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.json_schemas import schema_text
from maxlm.sandbox.limited_process import (
    LimitedProcess,
    LimitError,
    ProcessKilledError,
    ProcessLimits,
    RequestCancelledError,
)

_MIB = 1 << 20
# Limits of one grammar. The worker has a lower limit of CPU time for a mask.
LIMITS = ProcessLimits(
    cpu_seconds=5.0,
    memory_bytes=256 * _MIB,
    memory_per_byte=64,
    output_bytes=8 * _MIB,
    output_per_byte=0,
    wall_seconds=60.0,
)
# Time for one mask, on a machine that is busy with other processes.
MASK_WALL_SECONDS = 20.0
# Number and total memory of compiled grammars that no sample uses. The next request often has the same one.
MAX_IDLE_GRAMMARS, MAX_IDLE_BYTES = 16, 256 * _MIB
# Number and total memory of all compiled grammars.
MAX_GRAMMARS, MAX_BYTES = 64, 1024 * _MIB
# Time for which a refused grammar is refused without another attempt, and number of them.
REFUSED_SECONDS, MAX_REFUSED = 600.0, 1024
# State after a token: more tokens follow; the text is complete; no token may follow.
CONTINUES, COMPLETE, DEAD_END = b'+', b'.', b'!'
_TOO_COMPLEX = 'the schema is too complex'
_COMPACT = {'whitespace_flexible': False, 'item_separator': ',', 'key_separator': ':'}
# Maximum time for which the engine waits for masks if no sample has one. It then checks for new requests.
IDLE_SECONDS = 0.01
# Minimum time for which samples with a mask wait for the masks of others.
MIN_MASK_SECONDS = 0.002
# A word of a mask that allows all of its tokens.
ALL_TOKENS = np.int32(-1)


class TooComplexError(InputError):
    """Compilation of a grammar, or a mask, exceeded a limit."""


class GrammarsBusyError(Exception):
    """Too many grammars are in use."""


class GrammarsUnavailableError(Exception):
    """The process for grammars cannot be started."""


def json_grammar(schema: Mapping[str, Any], name: str = 'grammar') -> str:
    """Returns the grammar of the JSON values that a JSON schema allows, for `Request.grammar`.

    The JSON has no spaces or line breaks between its elements. A model could otherwise continue with them forever.

    Args:
        schema: JSON schema.
        name: name of the parameter, for errors.

    Raises:
        InputError: the schema is no JSON object or too large. `Grammars.compile` reports other mistakes.
    """
    given = schema.get('x-guidance')
    options = {**(given if isinstance(given, dict) else {}), **_COMPACT}
    text = schema_text({**schema, 'x-guidance': options}, name)
    return f'{{"grammars":[{{"json_schema":{text}}}]}}'


def num_words(num_ids: int) -> int:
    """Returns W, the number of words of a mask."""
    return -(-num_ids // 32)


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]):
        """Initializes the compiler. `end_ids` are the ids that may end a text."""
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._lock, self._host_lock = threading.Lock(), threading.Lock()
        # The process with the vocabulary, which starts at the first grammar.
        self._host = LimitedProcess('maxlm.inference.engine.grammar_worker:answer', LIMITS)
        self._compiled: collections.OrderedDict[bytes, CompiledGrammar] = collections.OrderedDict()
        self._in_use: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        # Time until which a grammar is refused, and the reason.
        self._refused: collections.OrderedDict[bytes, tuple[float, str]] = collections.OrderedDict()

    def compile(self, grammar: str, is_cancelled: Callable[[], bool] | None = None) -> CompiledGrammar:
        """Returns a compiled grammar.

        Args:
            grammar: text of the grammar.
            is_cancelled: called several times per second. If it returns True, compilation ends.

        Raises:
            InputError: the grammar is invalid or too complex, or the tokenizer has no texts.
            GrammarsBusyError: too many other grammars are in use.
            GrammarsUnavailableError: the process cannot be started.
            RequestCancelledError: `is_cancelled` returned True.
        """
        key = hashlib.sha256(grammar.encode(errors='surrogatepass')).digest()
        with self._lock:
            until, reason = self._refused.get(key, (0.0, ''))
            if time.monotonic() < until:
                raise (TooComplexError if _TOO_COMPLEX in reason else InputError)(reason)
            found = self._compiled.get(key)
            if found is not None and found.is_alive:
                self._compiled.move_to_end(key)
                return found
            if len(self._in_use) >= MAX_GRAMMARS or sum(each.num_bytes for each in self._in_use) > MAX_BYTES:
                raise GrammarsBusyError
        if is_cancelled is not None and is_cancelled():
            raise RequestCancelledError
        process = self._fork()
        try:
            result = process.ask(b'C' + grammar.encode(errors='replace'), is_cancelled)
        except RequestCancelledError:
            raise
        except InputError as error:
            process.close()
            self._refuse(key, f'grammar: {error}')
            raise InputError(f'grammar: {error}') from None
        except ProcessKilledError as error:
            raise GrammarsUnavailableError(f'the process for grammars {error}') from None
        except LimitError as error:
            reason = (
                f'grammar: {_TOO_COMPLEX}: its compilation {error}; use fewer alternatives and names, '
                'shorter patterns, or smaller numbers'
            )
            self._refuse(key, reason)
            raise TooComplexError(reason) from None
        first_mask = np.frombuffer(result, np.int32, offset=8)
        compiled = CompiledGrammar(
            process, first_mask, int.from_bytes(result[:8]), lambda reason: self._refuse(key, f'grammar: {reason}')
        )
        with self._lock:
            self._compiled[key] = compiled
            self._in_use.add(compiled)
            while len(self._compiled) > MAX_IDLE_GRAMMARS or (
                len(self._compiled) > 1 and sum(each.num_bytes for each in self._compiled.values()) > MAX_IDLE_BYTES
            ):
                self._compiled.popitem(last=False)
        return compiled

    def close(self) -> None:
        """Ends all processes."""
        self._host.close()

    def _refuse(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._compiled.pop(key, None)
            self._refused.pop(key, None)
            self._refused[key] = time.monotonic() + REFUSED_SECONDS, reason
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _fork(self) -> LimitedProcess:
        """Returns a process with the vocabulary. Raises InputError and GrammarsUnavailableError."""
        with self._host_lock:
            # The process may have been killed since the last grammar.
            for is_last in (False, True):
                try:
                    if not self._host.is_running:
                        self._send_vocabulary()
                    return self._host.fork()
                except LimitError as error:
                    self._host.close()
                    if is_last:
                        raise GrammarsUnavailableError(f'the process for grammars {error}') from None
        raise AssertionError('the last attempt returns or raises')

    def _send_vocabulary(self) -> None:
        tokenizer = self._tokenizer
        if tokenizer.kind == 'ids':
            raise InputError('grammar: the tokens of this model have no text; remove the grammar')
        facts: dict[str, Any] = {
            'size': tokenizer.vocab_size,
            'end_ids': self._end_ids,
            'end': tokenizer.end_of_document,
        }
        if tokenizer.kind == 'chars':
            special = {index: token.content for index, token in tokenizer.special_tokens.items()}
            facts['special'] = list(special)
            facts['chars'] = [
                special[index] if index in special else tokenizer.decode([index])
                for index in range(tokenizer.vocab_size)
            ]
        else:
            facts['tokenizer'] = tokenizer.marked_json()
        try:
            self._host.ask(b'V' + json.dumps(facts).encode())
        except InputError as error:
            self._host.close()
            raise InputError(
                f'grammar: the tokenizer of this model is not supported ({error}); remove the grammar'
            ) from error


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
        # Samples that wait for results, in the order of their requests; None: nobody waits for the result.
        self._requests: collections.deque[TokenMatcher | None] = collections.deque()
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
        except LimitError:
            return False

    def start(self) -> TokenMatcher:
        """Returns a matcher at the beginning of a text."""
        self._num_started += 1
        self._num_open += 1
        return TokenMatcher(self, self._num_started)

    def send(self, token: int, matcher: TokenMatcher) -> None:
        """Sends the next token of a sample. `poll` gives the result to the matcher."""
        numbers = [matcher.number, token, *self._ended]
        self._ended.clear()
        if not self._requests:
            self._deadline = time.monotonic() + MASK_WALL_SECONDS
        self._requests.append(matcher)
        try:
            self._process.send(b'N' + ' '.join(map(str, numbers)).encode())
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
                matcher = self._requests.popleft()
                if matcher is not None:
                    matcher.receive(result)
        except (LimitError, InputError) as error:
            self._fail(error)

    def release(self, matcher: TokenMatcher) -> None:
        """Ends a sample. Kills the process if it works for this sample only."""
        self._num_open -= 1
        if self.error or matcher.mask is self.first_mask:
            return
        if matcher.is_waiting:
            self._requests = collections.deque(None if each is matcher else each for each in self._requests)
            if not self._num_open:
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
            self.error = f'{_TOO_COMPLEX} to continue the response: the next token {error}; simplify it'
            self._on_failure(self.error)
        requests, self._requests = self._requests, collections.deque()
        for matcher in filter(None, requests):
            matcher.failure = self.error


class TokenMatcher:
    """Position of one text in a grammar.

    Attributes:
        number: number of the text.
        mask: tokens that may follow, as bits of int32 [W]; None while the process computes it, and after the end.
        is_complete: True if the text follows the grammar and no token may follow.
        failure: reason why the text cannot be completed, or ''.
        sent: time of the last token.
    """

    def __init__(self, grammar: CompiledGrammar, number: int):
        self.grammar, self.number = grammar, number
        self.mask: np.ndarray | None = grammar.first_mask
        self.is_complete = False
        self.failure = ''
        self.sent = 0.0

    @property
    def is_waiting(self) -> bool:
        """True if the result for the last token has not arrived."""
        return self.mask is None and not self.is_complete and not self.failure

    def accept(self, token: int) -> None:
        """Adds a token to the text. The other attributes are known when `is_waiting` becomes False."""
        self.mask = None
        self.sent = time.monotonic()
        if self.grammar.error:
            self.failure = self.grammar.error
        else:
            self.grammar.send(token, self)

    def receive(self, result: bytes) -> None:
        """Updates the attributes from a result of the process."""
        state = result[:1]
        if state == CONTINUES:
            self.mask = np.frombuffer(result, np.int32, offset=1)
        elif state == COMPLETE:
            self.is_complete = True
        else:
            self.failure = result[1:].decode()

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
        grammars = {matcher.grammar for matcher in waiting}
        for grammar in grammars:
            grammar.poll()
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
