"""Whether a tokenizer is another one with more tokens, so that a model of that one can go on with it."""

from __future__ import annotations

import json
from typing import Any

from maxlm.data.tokenizer.tokenizer import Tokenizer

# What of a `tokenizer.json` makes ids of texts and texts of ids, besides its tokens. What it puts around a text
# (`post_processor`) is not used here.
PARTS = ('truncation', 'padding', 'normalizer', 'pre_tokenizer', 'decoder')
# How a word of these is cut depends on rules alone (merges, blanks): more tokens change nothing in it.
GROWING_MODELS = ('BPE', 'WordLevel')
# Which blanks and words beside it an added token takes.
TAKES = ('lstrip', 'rstrip', 'single_word')


def extension_error(new: Tokenizer, old: Tokenizer) -> str:
    """What keeps `new` from being `old` with more tokens, in a few words; '' where it is.

    It is where all tokens of `old` have the same ids in it, those that it has besides come after all of them, and all
    else by which text becomes ids is the same.
    """
    now, before = json.loads(new.to_json()), json.loads(old.to_json())
    for part in PARTS:
        if now[part] != before[part]:
            return f'its {part} is another'
    model, model_before = now['model'], before['model']
    for name in sorted(model.keys() | model_before.keys()):
        may_grow = name == 'vocab' and model['type'] in GROWING_MODELS
        if not may_grow and model.get(name) != model_before.get(name):
            return f'its model.{name} is another'
    ids, ids_before = _ids(now), _ids(before)
    for token, index in sorted(ids_before.items(), key=lambda item: item[1]):
        if token not in ids:
            return f'it has no token {token!r}'
        if ids[token] != index:
            return f'its token {token!r} has the id {ids[token]} and not {index}'
    for token, index in ids.items():
        if token not in ids_before and index < old.vocab_size:
            return f'its token {token!r} is new and has the id {index}, below the {old.vocab_size} that there were'
    takes = _takes(now)
    for token, taken in _takes(before).items():
        if takes[token] != taken:
            return f'its token {token!r} takes other blanks and words'
    return ''


def _ids(facts: dict[str, Any]) -> dict[str, int]:
    vocab = facts['model']['vocab']
    # Unigram: pieces with their scores, in the order of ids.
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    return ids | {token['content']: token['id'] for token in facts['added_tokens']}


def _takes(facts: dict[str, Any]) -> dict[str, tuple[bool, ...]]:
    """Of all tokens; one that is no added token takes nothing."""
    found = dict.fromkeys(_ids(facts), (False,) * len(TAKES))
    return found | {token['content']: tuple(token[name] for name in TAKES) for token in facts['added_tokens']}
