"""Upper bound on the number of text bytes per token."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from maxlm.data.tokenizer.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4
# A canonical composition has at least a third of the bytes of its parts (Unicode's FAQ on normalization).
_COMPOSED = {'NFC': 3, 'NFD': 1}
# Number of characters in the alphabet of byte-level BPE, and number of byte-fallback tokens.
_NUM_BYTES = 256
_BYTE = re.compile(r'<0x[0-9A-Fa-f]{2}>')


@functools.lru_cache(8)
def longest_token(tokenizer: Tokenizer, *, parse_special: bool = False) -> int | None:
    """Returns the maximum number of text bytes that one token can represent, or None if there is no limit.

    A text with more than N times that number of bytes therefore has more than N tokens. With `parse_special`, the text
    may contain names of special tokens.
    """
    if tokenizer.kind == 'ids':
        # The numbers may be separated by any amount of whitespace.
        return None
    if tokenizer.kind == 'library':
        source = tokenizer.to_json() if parse_special else tokenizer.marked_json()
        return _longest(json.loads(source), parse_special=parse_special)
    special = tokenizer.special_tokens.values() if parse_special else ()
    longest = 1 if tokenizer.kind == 'bytes' else _MAX_CHARACTER_BYTES
    return max([longest, *(len(token.content.encode()) for token in special)])


def _longest(fields: dict[str, Any], *, parse_special: bool) -> int | None:
    model, steps = fields['model'], _steps(fields['pre_tokenizer'], 'pretokenizers')
    if model['type'] != 'BPE' or not all(_keeps_text(step) for step in steps):
        return None
    added = [token for token in fields['added_tokens'] if parse_special or not token['special']]
    if any(token['lstrip'] or token['rstrip'] or token['normalized'] for token in added):
        return None
    vocab = model['vocab']
    if any(step['type'] == 'ByteLevel' for step in steps):
        # Each character of a token is a byte. Bytes without a token would be dropped.
        if sum(len(token) == 1 for token in vocab) < _NUM_BYTES:
            return None
        longest = max(map(len, vocab))
    else:
        if not model['byte_fallback'] or sum(map(bool, map(_BYTE.fullmatch, vocab))) < _NUM_BYTES:
            return None
        longest = max(len(token.encode()) for token in vocab)
    longest = max([longest, *(len(token['content'].encode()) for token in added)])
    factor = _shrinking(_steps(fields['normalizer'], 'normalizers'))
    return None if factor is None else factor * longest


def _steps(node: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    return [step for one in node[key] for step in _steps(one, key)] if node['type'] == 'Sequence' else [node]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Returns True if a pre-tokenizer keeps the complete text."""
    if step['type'] in ('Split', 'Punctuation'):
        return step['behavior'] != 'Removed'
    return step['type'] in ('ByteLevel', 'Digits', 'Metaspace', 'UnicodeScripts')


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """Returns the factor by which normalizers can shrink a text in bytes, or None if there is no bound."""
    factor = 1
    for step in steps:
        if step['type'] in _COMPOSED:
            factor *= _COMPOSED[step['type']]
        elif step['type'] == 'Replace' and 'String' in step['pattern'] and step['content']:
            old, new = len(step['pattern']['String'].encode()), len(step['content'].encode())
            factor *= -(-old // new)
        elif step['type'] not in ('Prepend', 'ByteLevel'):
            return None
    return factor
