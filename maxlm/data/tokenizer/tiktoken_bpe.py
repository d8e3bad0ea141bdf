"""Byte-level BPE with tiktoken: the same ids as the `tokenizers` library, several times faster."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from maxlm.data.tokenizer.byte_and_char import byte_spelling

# Regular expression of `ByteLevel` in the library: the words of GPT-2 (Radford et al. 2019), from its `encoder.py`.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Split of GPT-4, from tiktoken's `openai_public.py`, as published tokenizers write it.
_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Expressions that both regex engines read alike. Others differ: {1,3}+ is possessive only in tiktoken.
SPLITS = (
    WORDS,
    # nanochat's, from its `tokenizer.py`.
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    *(_GPT4_WORDS.replace('{digits}', digits) for digits in (r'\p{N}', r'\p{N}{1,2}', r'\p{N}{1,3}')),
)


def byte_pair_encoder(library: tokenizers.Tokenizer) -> Callable[[str], np.ndarray] | None:
    """Returns an encoder from text to uint32 ids if `library` is byte-level BPE with one of SPLITS, else None.

    The library merges the pairs in its list of merges; tiktoken merges any pair that forms a token. Both give the same
    ids if each token has exactly one merge, ids follow the order of the merges, and each token is encoded to itself.
    Unless a merge crosses the boundaries of a token, the text of the token is merged independently of its context.

    The encoder raises ValueError for text that tiktoken cannot split, such as a very long sequence of spaces.
    """
    pattern = split_pattern(json.loads(library.to_str()))
    if pattern not in SPLITS:
        return None
    ranks = byte_pair_ranks(library)
    if ranks is None:
        return None

    import tiktoken

    encoding = tiktoken.Encoding('maxlm', pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: encoding.encode_to_numpy(text, disallowed_special=())


def byte_pair_ranks(library: tokenizers.Tokenizer) -> dict[bytes, int] | None:
    """Returns the bytes and the id of each token with which tiktoken merges the same pairs; None if it does not."""
    fields = json.loads(library.to_str())
    if not _is_plain(fields):
        return None
    special = {token['content'] for token in fields['added_tokens']}
    ids = {token: i for token, i in fields['model']['vocab'].items() if token not in special}
    spelling = byte_spelling()
    made = [''.join(pair) for pair in fields['model']['merges']]
    if ids.keys() != {*spelling.values(), *made}:
        return None
    # A difference of zero means that a token has two merges.
    if np.any(np.diff([ids[token] for token in made]) <= 0):
        return None
    if any(len(library.model.tokenize(token)) != 1 for token in made):
        return None
    byte_of = {character: byte for byte, character in spelling.items()}
    return {bytes(byte_of[character] for character in token): i for token, i in ids.items()}


def split_pattern(fields: dict[str, Any]) -> str | None:
    """Returns the regular expression that splits a text into words before byte-level BPE.

    Args:
        fields: content of a `tokenizer.json`.

    Returns:
        The expression, or None if the tokenizer splits otherwise.
    """
    match fields['pre_tokenizer']:
        case {'type': 'ByteLevel', 'use_regex': True, 'add_prefix_space': False}:
            return WORDS
        case {
            'type': 'Sequence',
            'pretokenizers': [
                {'type': 'Split', 'pattern': {'Regex': str(pattern)}, 'behavior': 'Isolated', 'invert': False},
                {'type': 'ByteLevel', 'use_regex': False, 'add_prefix_space': False},
            ],
        }:
            return pattern
    return None


def _is_plain(fields: dict[str, Any]) -> bool:
    """Returns True if a `tokenizer.json` uses only byte-level merges after its words."""
    model = fields['model']
    options = ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback', 'ignore_merges')
    return (
        model['type'] == 'BPE'
        and not any(model[option] for option in options)
        and not any(fields[step] for step in ('normalizer', 'truncation', 'padding'))
        and all(token['special'] for token in fields['added_tokens'])
    )
