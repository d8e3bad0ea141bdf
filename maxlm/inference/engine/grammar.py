"""Grammars that restrict generated tokens, such as a JSON schema, with llguidance (https://github.com/guidance-ai/llguidance).

Shapes: B rows, W words of 32 tokens each.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.inference.tool_calls import BEGIN, END
from maxlm.storage.json_text import parse_json

# Number of compiled grammars to keep. The next request often has the same one.
CACHE_SIZE = 64
# Part of llguidance's stop reasons for a text that no token may follow.
_DEAD_END = 'NoExtension'
# A word of a mask that allows all of its tokens.
ALL_TOKENS = np.int32(-1)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Returns the grammar of the JSON values that a JSON schema allows, for `Request.grammar`.

    The JSON has no spaces or line breaks between its elements. A model could otherwise continue with them forever.

    Raises:
        InputError: the schema is no JSON object. `Grammars.start` reports other mistakes.
    """
    compact = {'whitespace_flexible': False, 'item_separator': ',', 'key_separator': ':'}
    try:
        text = json.dumps(schema, allow_nan=False)
        grammar: str = _library().LLMatcher.grammar_from_json_schema(text, overrides=compact)
    except (ValueError, RecursionError) as error:
        raise InputError(f'grammar: the schema must be valid JSON: {" ".join(str(error).split())[:200]}') from error
    return grammar


def num_words(num_ids: int) -> int:
    """Returns W, the number of words of a mask."""
    return -(-num_ids // 32)


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]):
        """Initializes the compiler. `end_ids` are the ids that may end a text."""
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._lock = threading.Lock()
        # Created at the first grammar. For 128,000 ids this takes a fraction of a second.
        self._vocabulary: Any = None
        self._compile = functools.lru_cache(CACHE_SIZE)(self._compile_now)

    def start(self, grammar: str) -> TokenMatcher:
        """Returns a matcher at the beginning of a text.

        Raises:
            InputError: the grammar is invalid or too complex, or the tokenizer has no texts.
        """
        return TokenMatcher(self._compile(grammar).deep_copy(), num_words(self._tokenizer.vocab_size))

    def _compile_now(self, grammar: str) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
        matcher = _library().LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            reason = ' '.join(matcher.get_error().split())[:300]
            raise InputError(f'grammar: {reason}; change this part of the schema')
        first = TokenMatcher(matcher.deep_copy(), num_words(self._tokenizer.vocab_size))
        first.mask()
        if first.failure:
            raise InputError('grammar: no token of this model begins a text that the schema allows; change the schema')
        return matcher

    def _make_vocabulary(self) -> Any:
        tokenizer = self._tokenizer
        if tokenizer.kind == 'ids':
            raise InputError('grammar: the tokens of this model have no text; remove the grammar')
        library, ends = _library(), {'n_vocab': tokenizer.vocab_size, 'eos_token': self._end_ids}
        try:
            if tokenizer.kind == 'chars':
                wrapped: Any = _CharTokenizer(tokenizer)
            else:
                facts = _with_calls_as_text(parse_json(tokenizer.marked_json()))
                vocabulary = library.LLTokenizer(json.dumps(facts), **ends)
                added = _misread_tokens(facts['added_tokens'], vocabulary)
                if not added:
                    return vocabulary
                wrapped = _AddedTokenizer(tokenizer, vocabulary, added)
            return library.LLTokenizer(library.TokenizerWrapper(wrapped), **ends)
        except ValueError as error:
            reason = ' '.join(str(error).split())[:200]
            raise InputError(
                f'grammar: the tokenizer of this model is not supported ({reason}); remove the grammar'
            ) from error


class TokenMatcher:
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
        if not self._has_tokens or _DEAD_END in matcher.get_error().partition('\n')[0] + matcher.stop_reason():
            return (
                'the schema allows no token after the text so far; simplify it, e.g. let no pattern of '
                'patternProperties match a key of properties'
            )
        return 'the schema is too complex to continue the response; simplify it'


class _CharTokenizer:
    """A tokenizer of characters, with the attributes that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.end_of_document, None
        self.special_token_ids = list(tokenizer.special_tokens)
        self.tokens = [
            tokenizer.special_tokens[index].content.encode()
            if index in tokenizer.special_tokens
            else tokenizer.decode([index]).encode()
            for index in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch([text])[0].tolist()
        return ids


class _AddedTokenizer:
    """A tokenizer with added tokens that are text, with the attributes that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Any, added: Mapping[int, bytes]):
        """Initializes the tokenizer.

        Args:
            tokenizer: the tokenizer.
            vocabulary: the tokenizer as llguidance reads it, which has the bytes of other tokens.
            added: bytes of the added tokens that llguidance misreads, by id.
        """
        self._vocabulary = vocabulary
        self.eos_token_id, self.bos_token_id = tokenizer.end_of_document, None
        ids = range(tokenizer.vocab_size)
        self.tokens = [added[index] if index in added else vocabulary.decode_bytes([index]) for index in ids]
        self.special_token_ids = [index for index in ids if vocabulary.is_special_token(index) and index not in added]

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._vocabulary.tokenize_bytes(text)
        return ids


def _with_calls_as_text(facts: dict[str, Any]) -> dict[str, Any]:
    """Changes the content of a tokenizer.json: tokens around tool calls are text, as in the grammar of calls."""
    for token in facts['added_tokens']:
        if token['content'] in (BEGIN, END):
            token['special'] = False
    return facts


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


def _library() -> ModuleType:
    # Loading the library takes 20 ms, and most servers need no grammar.
    import llguidance

    module: ModuleType = llguidance
    return module
