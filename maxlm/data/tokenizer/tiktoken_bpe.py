"""Byte-level BPE by tiktoken: the ids that the library of `tokenizer.json` gives, several times as fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from maxlm.data.tokenizer.byte_and_char import byte_spelling

# What `ByteLevel` of the library splits text by: the words of GPT-2 (Radford et al. 2019), its `encoder.py`.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_pair_encoder(library: tokenizers.Tokenizer) -> Callable[[str], np.ndarray] | None:
    """Text → uint32 ids where `library` is byte-level BPE as `train_bpe` makes it, otherwise None.

    The library joins the pairs that are listed as merges; tiktoken joins any pair that makes a token. That is the same
    where each token has one merge, has its id in the order of the merges, and comes out of its own text alone: as long
    as nothing was joined across the ends of a token, what is between them was joined as in that text.

    The encoder raises ValueError for what tiktoken cannot split: a run of very many blanks.
    """
    facts = json.loads(library.to_str())
    if not _is_plain(facts):
        return None
    special = {token['content'] for token in facts['added_tokens']}
    ids = {word: i for word, i in facts['model']['vocab'].items() if word not in special}
    spelling = byte_spelling()
    made = [''.join(pair) for pair in facts['model']['merges']]
    if ids.keys() != {*spelling.values(), *made}:
        return None
    # No step of zero either: that is a token with two merges.
    if np.any(np.diff([ids[word] for word in made]) <= 0):
        return None
    if any(len(library.model.tokenize(word)) != 1 for word in made):
        return None

    import tiktoken

    byte_of = {character: byte for byte, character in spelling.items()}
    ranks = {bytes(byte_of[character] for character in word): i for word, i in ids.items()}
    encoding = tiktoken.Encoding('maxlm', pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
    return lambda text: encoding.encode_to_numpy(text, disallowed_special=())


def _is_plain(facts: dict[str, Any]) -> bool:
    """Whether `tokenizer.json` asks for nothing but GPT-2's words and byte-level merges."""
    model, words = facts['model'], facts['pre_tokenizer'] or {}
    options = ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback', 'ignore_merges')
    return (
        (model['type'], words.get('type')) == ('BPE', 'ByteLevel')
        and words['use_regex']
        and not words['add_prefix_space']
        and not any(model[option] for option in options)
        and not any(facts[step] for step in ('normalizer', 'truncation', 'padding'))
        and all(token['special'] for token in facts['added_tokens'])
    )
