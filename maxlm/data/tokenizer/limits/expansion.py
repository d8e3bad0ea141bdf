"""Limits of a `tokenizer.json` from other sources, checked before the library loads it.

A file of a few kilobytes can expand one letter to more than the memory, or take hours for a short text. The factor of a
step is an upper bound of the output bytes per input byte, and a sequence of steps has the product of their factors. The
limits are above the factors of published tokenizers. `regular_expressions` checks regular expressions.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tokenizers

from maxlm.errors import InputError, name_errors

# Maximum number of steps of a part, including nested ones.
_MAX_STEPS = 64
# XLNet has the normalizer with the largest factor: 1,089.
_MAX_NORMALIZER_FACTOR = 2048
_MAX_PRE_TOKENIZER_FACTOR, _MAX_DECODER_FACTOR = 16, 64
# Maximum number of characters of a pattern that is no regular expression, and of all regular expressions.
_MAX_PATTERN, _MAX_REGEX = 1000, 20_000
# Maximum number of added tokens and of their bytes after normalization, for each of which the library needs 75 bytes.
_MAX_ADDED, _MAX_ADDED_BYTES = 2**18, 2**24
# Maximum number of tokens that a post-processor adds.
_MAX_TEMPLATE_IDS = 2**16
# WordPiece needs quadratic time in the length of a word, and Unigram in the length of the longest token.
_MAX_WORD, _MAX_UNIGRAM_TOKEN = 256, 256
_MAX_AFFIX = 64
# Maximum factor of all steps before the model.
MAX_TEXT_FACTOR = _MAX_NORMALIZER_FACTOR * _MAX_PRE_TOKENIZER_FACTOR


def _size(value: Any) -> int:
    return len(value.encode('utf-8', 'surrogatepass')) if isinstance(value, str) else 0


def _replace(step: Mapping[str, Any]) -> float:
    pattern = step.get('pattern')
    text = pattern.get('String') if isinstance(pattern, dict) else pattern
    # A regular expression and an empty string also match between two characters.
    old, new = _size(text), _size(step.get('content'))
    return max(1.0, new / old) if old else 1.0 + new


def _precompiled(step: Mapping[str, Any]) -> float:
    """Returns the length of the longest replacement in a character map of SentencePiece.

    The map has the size of its trie, the trie, and the replacements, each followed by a null byte.
    """
    try:
        content = base64.b64decode(step.get('precompiled_charsmap') or '', validate=True)
        (size,) = struct.unpack_from('<I', content)
    except (TypeError, binascii.Error, struct.error):
        raise InputError('precompiled_charsmap is damaged; download the file again') from None
    # The library allocates this size.
    if size % 4 or size > len(content) - 4:
        raise InputError('precompiled_charsmap is damaged; download the file again')
    return float(max(1, *map(len, content[4 + size :].split(b'\0'))))


def _strip(step: Mapping[str, Any]) -> float:
    start, stop = (value if isinstance(value, int) else 0 for value in (step.get('start'), step.get('stop')))
    # The library panics on tokens that are shorter than both parts.
    if stop > 1 or (start and stop):
        raise InputError(f'Strip with start={start} and stop={stop} fails for short tokens; use another tokenizer')
    return 1.0


_Factor = Callable[[Mapping[str, Any]], float]
_NORMALIZERS: dict[str, float | _Factor] = {
    'BertNormalizer': 8.0,
    'ByteLevel': 2.0,
    'Lowercase': 1.5,
    'NFC': 3.0,
    'NFD': 3.0,
    'NFKC': 11.0,
    'NFKD': 11.0,
    'Nmt': 1.0,
    'Precompiled': _precompiled,
    'Prepend': lambda step: 1.0 + _size(step.get('prepend')),
    'Replace': _replace,
    'Strip': 1.0,
    'StripAccents': 1.0,
}
_PRE_TOKENIZERS: dict[str, float | _Factor] = {
    'BertPreTokenizer': 1.0,
    # Each word can have a space before it.
    'ByteLevel': lambda step: 4.0 if step.get('add_prefix_space') is not False else 2.0,
    'CharDelimiterSplit': 1.0,
    'Digits': 1.0,
    'FixedLength': 1.0,
    'Metaspace': 5.0,
    'Punctuation': 1.0,
    'Split': 1.0,
    'UnicodeScripts': 1.0,
    'Whitespace': 1.0,
    'WhitespaceSplit': 1.0,
}
_DECODERS: dict[str, float | _Factor] = {
    # An empty suffix matches between two characters.
    'BPEDecoder': 2.0,
    'ByteFallback': 1.0,
    'ByteLevel': 3.0,
    'CTC': 2.0,
    'Fuse': 1.0,
    'Metaspace': 1.0,
    'Replace': _replace,
    'Strip': _strip,
    'WordPiece': 2.0,
}
_PARTS: dict[str, tuple[str, Mapping[str, float | _Factor], int]] = {
    'normalizer': ('normalizers', _NORMALIZERS, _MAX_NORMALIZER_FACTOR),
    'pre_tokenizer': ('pretokenizers', _PRE_TOKENIZERS, _MAX_PRE_TOKENIZER_FACTOR),
    'decoder': ('decoders', _DECODERS, _MAX_DECODER_FACTOR),
}


def check_limits(fields: Mapping[str, Any]) -> None:
    """Raises InputError if a `tokenizer.json` exceeds a limit. The library detects values of other types."""
    factors = {name: _checked_factor(name, fields.get(name)) for name in _PARTS}
    if sum(map(len, regexes_of(fields))) > _MAX_REGEX:
        raise InputError(f'its regular expressions have more than {_MAX_REGEX:,} characters; use another tokenizer')
    _check_model(fields.get('model'))
    with _named('added_tokens'):
        _check_added(fields.get('added_tokens'), factors['normalizer'])
    with _named('post_processor'):
        for step in _steps(fields.get('post_processor'), 'processors'):
            _check_template(step)


def regexes_of(fields: Mapping[str, Any]) -> list[str]:
    """Returns the regular expressions of a `tokenizer.json`, in order."""
    patterns = [step.get('pattern') for name, (key, _, _) in _PARTS.items() for step in _steps(fields.get(name), key)]
    found = [pattern.get('Regex') for pattern in patterns if isinstance(pattern, dict)]
    return list(dict.fromkeys(regex for regex in found if isinstance(regex, str)))


def expansion_factor(library: tokenizers.Tokenizer) -> float:
    """Returns the maximum number of bytes that a loaded tokenizer makes of one byte of a text before its model."""
    parts = {'normalizer': library.normalizer, 'pre_tokenizer': library.pre_tokenizer}
    return math.prod(_parsed_factor(name, part.__getstate__()) for name, part in parts.items() if part is not None)


@functools.lru_cache(32)
def _parsed_factor(name: str, state: bytes) -> float:
    return _factor(name, json.loads(state))


def _steps(node: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yields the steps of a part of a `tokenizer.json`, with those of nested sequences. Raises InputError."""
    waiting, count = [node], 0
    while waiting:
        count += 1
        if count > _MAX_STEPS:
            raise InputError(f'has more than {_MAX_STEPS} steps; use another tokenizer')
        step = waiting.pop(0)
        if not isinstance(step, dict):
            # The library rejects everything but null.
            continue
        if step.get('type') != 'Sequence':
            yield step
            continue
        nested = step.get(key)
        waiting[:0] = nested[: _MAX_STEPS + 1] if isinstance(nested, list) else []


@contextlib.contextmanager
def _named(part: str) -> Iterator[None]:
    """Adds the name of a part of the file to errors."""
    with name_errors(part):
        yield


def _checked_factor(name: str, node: Any) -> float:
    limit = _PARTS[name][2]
    with _named(name):
        factor = _factor(name, node)
        if factor > limit:
            shown = f'{factor:,.0f}' if factor < 10**9 else 'more than 1,000,000,000'
            raise InputError(f'can expand a text {shown} times; the limit is {limit:,}; use another tokenizer')
    return factor


def _factor(name: str, node: Any) -> float:
    """Returns the factor of a part of a `tokenizer.json`."""
    key, table, _ = _PARTS[name]
    factors = []
    for step in _steps(node, key):
        kind = step.get('type')
        # The library guesses the type of a step without a known type.
        if not isinstance(kind, str) or kind not in table:
            raise InputError(f'type={kind!r:.100} is unknown; use one of {", ".join(table)} or Sequence')
        pattern = step.get('pattern')
        if isinstance(pattern, dict) and _size(pattern.get('String')) > _MAX_PATTERN:
            raise InputError(f'a pattern has more than {_MAX_PATTERN:,} bytes; use another tokenizer')
        bound = table[kind]
        factors.append(bound if isinstance(bound, float) else bound(step))
    return math.prod(factors)


def _check_model(model: Any) -> None:
    model = model if isinstance(model, dict) else {}
    longest = model.get('max_input_chars_per_word')
    if isinstance(longest, int) and longest > _MAX_WORD:
        raise InputError(f'model.max_input_chars_per_word={longest!r:.100}: must be at most {_MAX_WORD}')
    for key in ('continuing_subword_prefix', 'end_of_word_suffix'):
        if _size(model.get(key)) > _MAX_AFFIX:
            raise InputError(f'model.{key} has more than {_MAX_AFFIX} bytes; use another tokenizer')
    # Only Unigram has a list of tokens.
    vocab = model.get('vocab')
    entries = vocab if isinstance(vocab, list) else []
    texts = (entry[0] for entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str))
    longest = max(map(len, texts), default=0)
    if longest > _MAX_UNIGRAM_TOKEN:
        raise InputError(
            f'model.vocab has a token of {longest:,} characters; Unigram tokens have at most {_MAX_UNIGRAM_TOKEN}; '
            'use another tokenizer'
        )


def _check_added(tokens: Any, factor: float) -> None:
    """Raises InputError if there are too many added tokens, or the normalizer can expand them too much."""
    entries = [token for token in tokens if isinstance(token, dict)] if isinstance(tokens, list) else []
    if len(entries) > _MAX_ADDED:
        raise InputError(f'has {len(entries):,} tokens; the limit is {_MAX_ADDED:,}; use another tokenizer')
    for token in entries:
        # The library would scan all spaces of a run for each of them.
        if (token.get('lstrip') or token.get('rstrip')) and not str(token.get('content')).strip():
            raise InputError('a token of white space has lstrip or rstrip; use another tokenizer')
    size = sum(_size(token.get('content')) * (1.0 if token.get('normalized') is False else factor) for token in entries)
    if size > _MAX_ADDED_BYTES:
        raise InputError(f'can have {size:,.0f} bytes; the limit is {_MAX_ADDED_BYTES:,}; use another tokenizer')


def _check_template(step: Mapping[str, Any]) -> None:
    """Raises InputError if a template of a post-processor adds too many tokens."""
    special = step.get('special_tokens')
    entries = special.values() if isinstance(special, dict) else special if isinstance(special, list) else ()
    ids = [entry.get('ids') for entry in entries if isinstance(entry, dict)]
    longest = max([1, *(len(each) for each in ids if isinstance(each, list))])
    templates = [step.get(key) for key in ('single', 'pair')]
    single = templates[0] if isinstance(templates[0], list) else []
    # The library repeats a text even if it adds no special tokens.
    if (count := sum(isinstance(piece, dict) and 'Sequence' in piece for piece in single)) > 1:
        raise InputError(f'repeats a text {count:,} times; use another tokenizer')
    pieces = max([0, *(len(each) for each in templates if isinstance(each, str | list))])
    if pieces * longest > _MAX_TEMPLATE_IDS:
        raise InputError(f'has {pieces:,} pieces of up to {longest:,} ids; use another tokenizer')
