"""Removes special tokens from the vocabulary of the model of a tokenizer, so that no text becomes such a token.

The library splits a text at added tokens unless `encode_special_tokens` is set. Then the model gets their names as
text. A vocabulary that contains the names maps them to the ids of the special tokens: Unigram, WordPiece, WordLevel,
and BPE with `ignore_merges` or with merges that produce a name.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import tokenizers

from maxlm.data.tokenizer.limited_encoding import encode_long


def without_special_pieces(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the same ids for other texts, or `library` itself if names of tokens are only text."""
    special = {index: token.content for index, token in library.get_added_tokens_decoder().items() if token.special}
    encoded = encode_long(library, list(special.values()))
    if not any(special.keys() & ids.tolist() for ids in encoded):
        return library
    # No text contains the new names, because they are random. No output contains them.
    prefix = secrets.token_hex(16)
    names = {name: prefix + name for name in special.values()}
    fields = json.loads(library.to_str())
    for token in fields['added_tokens']:
        token['content'] = names.get(token['content'], token['content'])
    _rename(fields['model'], names)
    renamed = tokenizers.Tokenizer.from_str(json.dumps(fields))
    renamed.encode_special_tokens = True
    return renamed


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames pieces of a model of `tokenizer.json`, and removes the merges that contain or produce them."""
    vocab = model['vocab']
    if isinstance(vocab, dict):
        model['vocab'] = {names.get(piece, piece): index for piece, index in vocab.items()}
    else:
        model['vocab'] = [[names.get(piece, piece), score] for piece, score in vocab]
    if 'merges' in model:
        pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
        model['merges'] = [pair for pair in pairs if names.keys().isdisjoint([*pair, ''.join(pair)])]
    if model.get('unk_token') in names:
        model['unk_token'] = names[model['unk_token']]
