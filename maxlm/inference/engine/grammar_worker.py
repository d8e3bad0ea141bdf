"""Compiles grammars and computes token masks with llguidance (https://github.com/guidance-ai/llguidance).

This module runs in limited processes, see `maxlm.inference.engine.grammar`. A process reads the vocabulary and is then
forked for each grammar. A request consists of one letter and its argument:

| request | argument | result |
|---|---|---|
| V | JSON with the vocabulary | |
| C | grammar | memory in 8 bytes, mask of the first token |
| N | samples that have ended; new tokens of other samples | for each sample with tokens: length and `MaskResult` |

A token is forced if the mask allows no other one. The process adds forced tokens itself, and the next mask belongs to
the position after them. llguidance also forces a text that no alternative has, with the tokens that its tokenizer
splits the text into: its masks then allow one token each.

Shapes: W words of 32 tokens each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from maxlm.errors import InputError
from maxlm.inference.engine.compiled_grammar import COMPLETE, CONTINUES, DEAD_END, MAX_FORCED, SIZE_BYTES, MaskResult
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
    ended, *samples = argument.decode().split(';')
    for number in map(int, ended.split()):
        _worker.samples.pop(number, None)
    results = b''
    for sample in samples:
        number, is_truncated, *tokens = map(int, sample.split())
        limit_cpu(MASK_SECONDS)
        result = _worker.next_mask(number, tokens, is_truncated=bool(is_truncated)).to_bytes()
        results += len(result).to_bytes(SIZE_BYTES) + result
    return results


class _Worker:
    """State of the process: the vocabulary, then a grammar and the position of each sample in it."""

    def __init__(self) -> None:
        self.vocabulary: Any = None
        self.samples: dict[int, TextPosition] = {}
        self._matcher: Any = None
        self._first_words = np.zeros(0, np.int32)

    def compile(self, grammar: str) -> bytes:
        """Compiles a grammar and returns the mask of the first token."""
        limits = llguidance.LLParserLimits(**_LIMITS)
        self._matcher = llguidance.LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise InputError(f'{_reason(self._matcher)}; change this part of the schema')
        first = TextPosition(self._matcher, np.zeros(-(-self.vocabulary.vocab_size // 32), np.int32))
        first.compute_mask()
        if first.failure:
            raise InputError('no token of this model begins a text that the schema allows; change the schema')
        self._first_words = first.words
        return first.words.tobytes()

    def next_mask(self, sample: int, tokens: Sequence[int], *, is_truncated: bool) -> MaskResult:
        """Adds tokens to a sample, then the tokens that are forced, and returns the next mask or the end of the text.

        All tokens were sampled with the last mask. A later one counts only if its own mask gives the same token: if it
        equals the last mask, or if it allows a part of the tokens, including this one, and no top-k, top-p or min-p
        truncates the distribution. The token with the largest perturbed logit is then the same.
        """
        if sample not in self.samples:
            # Each computation of the first mask would take memory.
            self.samples[sample] = TextPosition(self._matcher, self._first_words)
        position = self.samples[sample]
        last_words, start = position.words, time.thread_time()
        num_accepted = 0
        for token in tokens:
            if num_accepted and (
                _is_slow(start) or not is_same_sample(token, position.words, last_words, is_truncated=is_truncated)
            ):
                break
            position.accept(token)
            num_accepted += 1
            if position.is_complete:
                return MaskResult(num_accepted, (), COMPLETE)
            if position.failure:
                return MaskResult(num_accepted, (), DEAD_END + position.failure.encode())
        forced: list[int] = []
        while len(forced) < MAX_FORCED and not _is_slow(start) and (only := position.accept_forced()) is not None:
            forced.append(only)
        return MaskResult(num_accepted, tuple(forced), CONTINUES + position.words.tobytes())


class TextPosition:
    """Position of one text in a grammar.

    Attributes:
        words: tokens that may follow, as bits of int32 [W]. If the text is complete, they have no meaning.
    """

    def __init__(self, matcher: Any, words: np.ndarray):
        """Initializes the beginning of a text with the first mask."""
        self._root, self._matcher = matcher, matcher.deep_copy()
        self._tokens: list[int] = []
        self.words = words

    def accept(self, token: int) -> None:
        """Adds a token to the text. The text has a failure if the grammar does not allow it."""
        self._tokens.append(token)
        self._matcher.consume_token(token)
        if not self.is_complete:
            self.compute_mask()

    def accept_forced(self) -> int | None:
        """Adds the only token that may follow and that does not end the text, and returns it; None if there is none.

        The model samples the last token, so that each text ends with a sampled token.
        """
        if (token := only_token(self.words)) is None:
            return None
        self.accept(token)
        if not self.is_complete and not self.failure:
            return token
        # llguidance does not undo a token after which no other one may follow.
        del self._tokens[-1]
        self._matcher = self._root.deep_copy()
        for before in self._tokens:
            self._matcher.consume_token(before)
        self.compute_mask()
        return None

    def compute_mask(self) -> None:
        """Computes `words` of the current position."""
        self.words = np.empty_like(self.words)
        self._matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)

    @property
    def is_complete(self) -> bool:
        """True if the text follows the grammar and no token other than an end token may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    @property
    def failure(self) -> str:
        """Reason why an incomplete text cannot be completed, or ''.

        In a dead end, the mask of llguidance allows the end tokens although the text is incomplete.
        """
        matcher = self._matcher
        has_tokens = bool(self.words.any())
        if has_tokens and not matcher.is_error() and (matcher.is_accepting() or not matcher.is_stopped()):
            return ''
        if not has_tokens or _NO_EXTENSION in matcher.get_error().partition('\n')[0] + matcher.stop_reason():
            return (
                'the schema allows no token after the text so far; simplify it, e.g. let no pattern of '
                'patternProperties match a key of properties'
            )
        return 'the schema is too complex to continue the response; simplify it'


def only_token(words: np.ndarray) -> int | None:
    """Returns the token that a mask allows, or None if it allows several."""
    indices = np.flatnonzero(words)
    if len(indices) != 1:
        return None
    word = int(words[indices[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(indices[0]) + word.bit_length() - 1


def _is_slow(start: float) -> bool:
    """Returns True if the masks since `start` took a part of the CPU time of one. The next ones belong to a result."""
    return time.thread_time() - start > MASK_SECONDS / 10


def is_same_sample(token: int, words: np.ndarray, other_words: np.ndarray, *, is_truncated: bool) -> bool:
    """Returns True if sampling with the mask `words` gives the token that was sampled with `other_words`."""
    if np.array_equal(words, other_words):
        return True
    is_allowed = bool(words[token // 32] >> token % 32 & 1)
    return not is_truncated and is_allowed and not (words & ~other_words).any()


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
        self._vocabulary, self._special = vocabulary, frozenset(special)
        characters = () if vocabulary is not None else tokens
        self._ids = {token.decode(errors='replace'): index for index, token in enumerate(characters)}

    def __call__(self, text: bytes | str) -> list[int]:
        if self._vocabulary is None:
            return [self._ids[character] for character in _characters(text) if character in self._ids]
        ids: list[int] = self._vocabulary.tokenize_bytes(text)
        if self._special.isdisjoint(ids):
            return ids
        # The text contains the name of a special token, such as an end token, which would end the response.
        return [token for character in _characters(text) for token in self._vocabulary.tokenize_str(character)]


def _characters(text: bytes | str) -> str:
    return text if isinstance(text, str) else text.decode(errors='replace')


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
