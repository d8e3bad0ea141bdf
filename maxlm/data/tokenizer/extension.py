"""Checks that a tokenizer extends another one, so that a model of the original tokenizer can be trained with it."""

from __future__ import annotations

import json
from typing import Any

from maxlm.data.tokenizer.tokenizer import Tokenizer

# Parts of a `tokenizer.json` other than the tokens that determine encoding and decoding. The tokens added around a
# text (`post_processor`) are not used here.
PARTS = ('normalizer', 'pre_tokenizer', 'decoder')
# These models split words only by rules (merges, whitespace), so additional tokens do not change existing splits.
GROWING_MODELS = ('BPE', 'WordLevel')
# Options of an added token that decide which adjacent whitespace and words it matches.
TAKES = ('lstrip', 'rstrip', 'single_word')


def extension_error(new: Tokenizer, old: Tokenizer) -> str:
    """Returns the reason why `new` does not extend `old`, or '' if it does.

    `new` extends `old` if all tokens of `old` keep their ids, additional tokens have higher ids, and all other parts
    that affect encoding are equal.
    """
    now, before = json.loads(new.to_json()), json.loads(old.to_json())
    for part in PARTS:
        if now[part] != before[part]:
            return f'its {part} differs'
    model, model_before = now['model'], before['model']
    for name in sorted(model.keys() | model_before.keys()):
        may_grow = name == 'vocab' and model['type'] in GROWING_MODELS
        if not may_grow and model.get(name) != model_before.get(name):
            return f'its model.{name} differs'
    ids, ids_before = _ids(now), _ids(before)
    for token, index in sorted(ids_before.items(), key=lambda item: item[1]):
        if token not in ids:
            return f'it has no token {token!r}'
        if ids[token] != index:
            return f'its token {token!r} has the id {ids[token]} instead of {index}'
    for token, index in ids.items():
        if token not in ids_before and index < old.vocab_size:
            return f'its new token {token!r} has the id {index}, below the previous vocab_size={old.vocab_size}'
    takes = _takes(now)
    for token, taken in _takes(before).items():
        if takes[token] != taken:
            return f'its token {token!r} has other values of {", ".join(TAKES)}'
    return ''


def _ids(fields: dict[str, Any]) -> dict[str, int]:
    vocab = fields['model']['vocab']
    # A Unigram vocabulary is a list of (piece, score) in the order of the ids.
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    return ids | {token['content']: token['id'] for token in fields['added_tokens']}


def _takes(fields: dict[str, Any]) -> dict[str, tuple[bool, ...]]:
    """Returns the TAKES options of all tokens. They are False for tokens that are not added tokens."""
    found = dict.fromkeys(_ids(fields), (False,) * len(TAKES))
    return found | {token['content']: tuple(token[name] for name in TAKES) for token in fields['added_tokens']}


def boundary_change(new: Tokenizer, old: Tokenizer) -> str:
    """Returns the tokens at the beginning and the end of a text that differ from those of `old`; '' if none does."""
    before, now = old.boundary_names, new.boundary_names
    changes = {
        'end of text': (now['end_of_text'][0], before['end_of_text'][0]),
        'beginning of text': tuple(' '.join(names['beginning_of_text']) or 'none' for names in (now, before)),
    }
    return '; '.join(f'{what} {one}, not {other}' for what, (one, other) in changes.items() if one != other)
