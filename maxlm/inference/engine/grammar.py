"""Structured output: grammars that restrict generated tokens, such as a JSON schema.

A grammar can take any amount of time and memory. Therefore each one is compiled in a process of its own, with limits,
which also computes the masks of all samples with this grammar: see `grammar_worker`. If a limit is exceeded, the
process is killed, and only these samples fail.

Shapes: W words of 32 tokens each.
"""

from __future__ import annotations

import collections
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.compiled_grammar import TOO_COMPLEX, CompiledGrammar
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
# Number and total memory of compiled grammars that no sample uses. The next request often has the same one.
MAX_IDLE_GRAMMARS, MAX_IDLE_BYTES = 16, 256 * _MIB
# Number and total memory of all compiled grammars.
MAX_GRAMMARS, MAX_BYTES = 64, 1024 * _MIB
# Time for which a refused grammar is refused without another attempt, and number of them.
REFUSED_SECONDS, MAX_REFUSED = 600.0, 1024
_COMPACT = {'whitespace_flexible': False, 'item_separator': ',', 'key_separator': ':'}


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
    guidance = schema.get('x-guidance')
    options = {**(guidance if isinstance(guidance, dict) else {}), **_COMPACT}
    text = schema_text({**schema, 'x-guidance': options}, name)
    return f'{{"grammars":[{{"json_schema":{text}}}]}}'


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
                raise (TooComplexError if TOO_COMPLEX in reason else InputError)(reason)
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
            result = process.call(b'C' + grammar.encode(errors='replace'), is_cancelled)
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
                f'grammar: {TOO_COMPLEX}: its compilation {error}; use fewer alternatives and names, '
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
        vocabulary: dict[str, Any] = {
            'size': tokenizer.vocab_size,
            'end_ids': self._end_ids,
            'end': tokenizer.end_of_document,
        }
        if tokenizer.kind == 'chars':
            special = {index: token.content for index, token in tokenizer.special_tokens.items()}
            vocabulary['special'] = list(special)
            vocabulary['chars'] = [
                special[index] if index in special else tokenizer.decode([index])
                for index in range(tokenizer.vocab_size)
            ]
        else:
            vocabulary['tokenizer'] = tokenizer.marked_json()
        try:
            self._host.call(b'V' + json.dumps(vocabulary).encode())
        except InputError as error:
            self._host.close()
            raise InputError(
                f'grammar: the tokenizer of this model is not supported ({error}); remove the grammar'
            ) from error
