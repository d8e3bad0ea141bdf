"""Compiles grammars and computes token masks with llguidance (https://github.com/guidance-ai/llguidance).

This module runs in limited processes, see `maxlm.inference.engine.grammar`. A process reads the vocabulary and is then
forked for each grammar. A request consists of one letter and its argument:

| request | argument | result |
|---|---|---|
| V | JSON with the vocabulary | |
| C | grammar | memory in 8 bytes, mask of the first token |
| N | samples that have ended; pairs of a sample and a token | for each pair: length, state, and mask unless ended |

Shapes: W words of 32 tokens each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from maxlm.errors import InputError
from maxlm.inference.engine.compiled_grammar import COMPLETE, CONTINUES, DEAD_END, SIZE_BYTES
from maxlm.inference.tool_calls import BEGIN, END
from maxlm.sandbox.process.server import RESIDENT, limit_cpu, memory_bytes

# CPU time of one mask and of the vocabulary.
MASK_SECONDS, VOCABULARY_SECONDS = 1.0, 60.0
# Niceness while a grammar is compiled.
COMPILE_NICE = 10
# Part of llguidance's stop reasons for a text that no token may follow.
_NO_EXTENSION = 'NoExtension'
# Each state takes up to 2 KB.
_LIMITS = {'max_lexer_states': 50_000, 'verbose_errors': False}


def answer(request: bytes) -> bytes:
    """Returns the result of a request. Raises InputError if the vocabulary or the grammar is invalid."""
    kind, argument = request[:1], request[1:]
    if kind == b'V':
        limit_cpu(VOCABULARY_SECONDS)
        _worker.vocabulary = make_vocabulary(json.loads(argument))
        return b''
    if kind == b'C':
        before = memory_bytes(RESIDENT)
        with _low_priority():
            mask = _worker.compile(argument.decode())
        return max(0, memory_bytes(RESIDENT) - before).to_bytes(8) + mask
    ended, _, pairs = argument.decode().partition(';')
    for number in ended.split():
        _worker.samples.pop(int(number), None)
    numbers = iter(map(int, pairs.split()))
    results = b''
    for sample, token in zip(numbers, numbers, strict=True):
        limit_cpu(MASK_SECONDS)
        result = _worker.next_mask(sample, token)
        results += len(result).to_bytes(SIZE_BYTES) + result
    return results


class _Worker:
    """State of the process: the vocabulary, then a grammar and the position of each sample in it."""

    def __init__(self) -> None:
        self.vocabulary: Any = None
        self.samples: dict[int, TextPosition] = {}
        self._matcher: Any = None

    def compile(self, grammar: str) -> bytes:
        """Compiles a grammar and returns the mask of the first token."""
        limits = llguidance.LLParserLimits(**_LIMITS)
        self._matcher = llguidance.LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise InputError(f'{_reason(self._matcher)}; change this part of the schema')
        first = self._start()
        words = first.mask()
        if first.failure:
            raise InputError('no token of this model begins a text that the schema allows; change the schema')
        return words.tobytes()

    def next_mask(self, sample: int, token: int) -> bytes:
        """Adds a token to a sample and returns its state and the next mask, or the reason of a failure."""
        if sample not in self.samples:
            self.samples[sample] = self._start()
        matcher = self.samples[sample]
        if matcher.accept(token):
            if matcher.is_complete:
                return COMPLETE
            words = matcher.mask()
            if not matcher.failure:
                return CONTINUES + words.tobytes()
        return DEAD_END + matcher.failure.encode()

    def _start(self) -> TextPosition:
        return TextPosition(self._matcher.deep_copy(), -(-self.vocabulary.vocab_size // 32))


class TextPosition:
    """Position of one text in a grammar."""

    def __init__(self, matcher: Any, size: int):
        self._matcher, self._size = matcher, size
        self._has_tokens = True

    def mask(self) -> np.ndarray:
        """Returns the tokens that may follow, as bits of int32 [W]. If the text is complete, only end tokens may."""
        words = np.empty(self._size, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._has_tokens = bool(words.any())
        return words

    def accept(self, token: int) -> bool:
        """Adds a token to the text. Returns False if the grammar does not allow it."""
        accepted: bool = self._matcher.consume_token(token)
        return accepted

    @property
    def is_complete(self) -> bool:
        """True if the text follows the grammar and no token other than an end token may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    @property
    def failure(self) -> str:
        """Reason why the text cannot be completed, or ''. A dead end is known after `mask`.

        In a dead end, the mask of llguidance allows the end tokens although the text is incomplete.
        """
        matcher = self._matcher
        if self._has_tokens and not matcher.is_error() and (matcher.is_accepting() or not matcher.is_stopped()):
            return ''
        if not self._has_tokens or _NO_EXTENSION in matcher.get_error().partition('\n')[0] + matcher.stop_reason():
            return (
                'the schema allows no token after the text so far; simplify it, e.g. let no pattern of '
                'patternProperties match a key of properties'
            )
        return 'the schema is too complex to continue the response; simplify it'


def make_vocabulary(spec: Mapping[str, Any]) -> Any:
    """Returns the vocabulary of llguidance. Raises InputError.

    Args:
        spec: the number of ids (`size`), the ids that may end a text (`end_ids`), the id at the end of a
            document (`end`), and either the texts of characters (`chars`), with those that are special (`special`), or
            the content of a tokenizer.json (`tokenizer`).
    """
    ends = {'n_vocab': spec['size'], 'eos_token': spec['end_ids']}
    try:
        if 'chars' in spec:
            wrapped = _Vocabulary(spec['end'], [text.encode() for text in spec['chars']], spec['special'])
        else:
            tokenizer = _with_calls_as_text(json.loads(spec['tokenizer']))
            vocabulary = llguidance.LLTokenizer(json.dumps(tokenizer), **ends)
            added = _misread_tokens(tokenizer['added_tokens'], vocabulary)
            if not added:
                return vocabulary
            ids = range(spec['size'])
            tokens = [added[index] if index in added else vocabulary.decode_bytes([index]) for index in ids]
            special = [index for index in ids if vocabulary.is_special_token(index) and index not in added]
            wrapped = _Vocabulary(spec['end'], tokens, special, vocabulary)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped), **ends)
    except ValueError as error:
        raise InputError(' '.join(str(error).split())[:200]) from error


class _Vocabulary:
    """A tokenizer with the attributes that llguidance needs."""

    def __init__(self, end: int, tokens: list[bytes], special: list[int], vocabulary: Any = None):
        """Initializes the tokenizer.

        Args:
            end: id at the end of a document.
            tokens: bytes of each token.
            special: ids of tokens that are no text.
            vocabulary: tokenizer of texts; None = each character is a token.
        """
        self.eos_token_id, self.bos_token_id, self.tokens, self.special_token_ids = end, None, tokens, special
        self._vocabulary = vocabulary
        self._ids = {token.decode(errors='replace'): index for index, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        if self._vocabulary is not None:
            ids: list[int] = self._vocabulary.tokenize_bytes(text)
            return ids
        characters = text if isinstance(text, str) else text.decode(errors='replace')
        return [self._ids[character] for character in characters if character in self._ids]


def _with_calls_as_text(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Changes the content of a tokenizer.json: tokens around tool calls are text, as in the grammar of calls."""
    for token in tokenizer['added_tokens']:
        if token['content'] in (BEGIN, END):
            token['special'] = False
    return tokenizer


def _misread_tokens(added: Sequence[Mapping[str, Any]], vocabulary: Any) -> dict[int, bytes]:
    """Returns the bytes of added tokens that are text, but not for llguidance.

    llguidance reads all added tokens in angle brackets as special, such as `<tool_call>` of Qwen and `<think>`.
    """
    texts = {token['id']: token['content'].encode() for token in added if not token['special']}
    return {
        index: text
        for index, text in texts.items()
        if vocabulary.is_special_token(index) or vocabulary.decode_bytes([index]) != text
    }


def _reason(matcher: Any) -> str:
    """Returns an error as one line, without the lines of the grammar."""
    text = re.split(r'\n\s*\d+ \| ', matcher.get_error())[0]
    return ' '.join(re.sub(r'\bat \d+\(\d+\): |failed to compile JSON schema: |<non-verbose/>', '', text).split())[:300]


@contextlib.contextmanager
def _low_priority() -> Iterator[None]:
    """Lowers the priority, so that compilation does not slow down the rest of the machine."""
    before = os.nice(0)
    os.nice(COMPILE_NICE)
    yield
    # Users other than root cannot raise it again.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, before)


_worker = _Worker()
