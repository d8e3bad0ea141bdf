"""Converts nanochat's `tokenizer.pkl`, a pickled `tiktoken.Encoding`, from and to a tokenizer.

A text of nanochat begins with `<|bos|>`, which also separates documents.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from maxlm.data.tokenizer.byte_and_char import byte_spelling
from maxlm.data.tokenizer.library import load_library
from maxlm.data.tokenizer.text_boundaries import TextBoundaries
from maxlm.data.tokenizer.tiktoken_bpe import byte_pair_ranks, split_pattern
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, explain_os_errors
from maxlm.huggingface.nanochat.pickle_parser import PickledCall, parse_pickle
from maxlm.storage.check_directory import check_entries
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_bytes

FILE = 'tokenizer.pkl'
MAX_BYTES = 2**24
BEGINNING = '<|bos|>'
# Tokens after which nanochat's engine stops.
_STOPS = (BEGINNING, '<|assistant_end|>')
_ENCODING = 'tiktoken.core.Encoding'
# Bounds the time of `_merges`, which is quadratic in the length of a token. 65,536 tokens of 8 bytes have 2²².
_MAX_SQUARES = 2**27
# Texts for a comparison with tiktoken: long runs of each kind of character, ends of lines, and changes of case.
_TEXTS = (
    '1234567',
    'the\nthe  \n\n the \t\r\n  ',
    "I'm, I'LL you'RE the_The TheTHE",
    'a b  c   d\u00a0e!?.../-- é中文٣',
)
_EXPORT = 'export a tokenizer.json, and give it with --tokenizer=FILE'


class Encoding(NamedTuple):
    """The content of a `tiktoken.Encoding`.

    Attributes:
        ranks: bytes → id of the token; a pair with a smaller id is merged first.
        pattern: regular expression that splits a text into words.
        special_tokens: text → id.
    """

    ranks: dict[bytes, int]
    pattern: str
    special_tokens: dict[str, int]


def read_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.pkl`, or of a `tokenizer.json` with the same tokens.

    Raises:
        InputError: the file cannot be read, its pickle contains something else, or the tokens are not those of
            byte-level BPE.
    """
    if path.suffix != '.pkl':
        loaded = Tokenizer.load(path)
        names = {token.content: index for index, token in loaded.special_tokens.items()}
        # A file without other files does not say that texts begin with the token.
        if BEGINNING in names and not loaded.beginning_of_document:
            return Tokenizer(tokenizers.Tokenizer.from_str(loaded.to_json()), _boundaries(names, path.name))
        return loaded
    check_entries(path.parent, (path.name,), limit=MAX_BYTES)
    with explain_os_errors(path, 'choose a readable file'):
        content = read_bytes(path, limit=MAX_BYTES)
    encoding = _encoding(parse_pickle(content, (_ENCODING,), str(path)), str(path))
    if BEGINNING not in encoding.special_tokens:
        raise InputError(f'{path}: has no special token {BEGINNING}; use a tokenizer of nanochat')
    try:
        library = load_library(json.dumps(_tokenizer_json(encoding)), str(path))
    except UnicodeEncodeError as error:
        raise InputError(f'{path}: the tokenizer is damaged ({error}); copy the file again') from error
    tokenizer = Tokenizer(library, _boundaries(encoding.special_tokens, FILE))
    _check_splits(tokenizer, encoding, str(path))
    return tokenizer


def _check_splits(tokenizer: Tokenizer, encoding: Encoding, source: str) -> None:
    """Raises InputError if tiktoken splits texts otherwise than the library, whose regular expressions differ.

    For example, {1,3}+ is possessive only in tiktoken, and $ is the end of a line only in the library.
    """
    import tiktoken

    try:
        reference = tiktoken.Encoding(
            'rustbpe', pat_str=encoding.pattern, mergeable_ranks=encoding.ranks, special_tokens={}
        )
        expected = [reference.encode_ordinary(text) for text in _TEXTS]
    except ValueError as error:
        raise InputError(f'{source}: its pattern is not usable ({error}); {_EXPORT}') from error
    found = [ids.tolist() for ids in tokenizer.encode_batch_by_library(_TEXTS)]
    if wrong := [text for text, *ids in zip(_TEXTS, expected, found, strict=True) if ids[0] != ids[1]]:
        raise InputError(
            f'{source}: the pattern {encoding.pattern[:100]!r} splits {wrong[0]!r} otherwise than in tiktoken; '
            'use a tokenizer with another pattern'
        )


def write_tokenizer(tokenizer: Tokenizer) -> bytes:
    """Returns the content of a `tokenizer.pkl`.

    Raises:
        InputError: tiktoken cannot encode as this tokenizer does, or the tokenizer lacks `<|bos|>`.
    """
    text = tokenizer.marked_json()
    special = {token.content: index for index, token in sorted(tokenizer.special_tokens.items())}
    pattern, ranks = split_pattern(parse_json(text)), byte_pair_ranks(tokenizers.Tokenizer.from_str(text))
    if pattern is None or ranks is None or BEGINNING not in special:
        raise InputError(
            f'only a byte-level BPE tokenizer with the token {BEGINNING} can be written as {FILE}; use a model with a '
            'tokenizer of nanochat'
        )

    import tiktoken

    encoding = tiktoken.Encoding('rustbpe', pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return pickle.dumps(encoding, protocol=4)


def _boundaries(special_tokens: Mapping[str, int], source: str) -> TextBoundaries:
    """Returns the boundaries of a text of nanochat, whose special tokens have these ids."""
    stops = tuple(special_tokens[name] for name in _STOPS if name in special_tokens)
    return TextBoundaries(stops[0], stops, stops[:1], source, source)


def _encoding(value: Any, source: str) -> Encoding:
    """Checks a parsed pickle and returns its content."""
    match value:
        case PickledCall(state=str(name)):
            raise InputError(f'{source}: is the encoding {name[:100]!r} of tiktoken, which has no content; {_EXPORT}')
        case PickledCall(
            state={'pat_str': str(pattern), 'mergeable_ranks': dict(ranks), 'special_tokens': dict(special_tokens)}
        ):
            pass
        case _:
            raise InputError(f'{source}: contains no encoding of tiktoken; use {FILE} of nanochat')
    tokens = [*ranks.items(), *special_tokens.items()]
    is_typed = all(isinstance(token, bytes) and token for token in ranks)
    is_typed &= all(isinstance(token, str) and token for token in special_tokens)
    if not is_typed or sorted(_numbers(tokens)) != list(range(len(tokens))):
        raise InputError(f'{source}: the tokens are not numbered from 0 to {len(tokens) - 1:,}; {_EXPORT}')
    if sum(len(token) ** 2 for token in ranks) > _MAX_SQUARES:
        raise InputError(f'{source}: its tokens are too long; use another tokenizer')
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise InputError(f'{source}: has no token for byte {missing[0]}; {_EXPORT}')
    return Encoding(ranks, pattern, special_tokens)


def _numbers(tokens: list[tuple[Any, Any]]) -> list[int]:
    return [number for _, number in tokens if type(number) is int]


def _tokenizer_json(encoding: Encoding) -> dict[str, Any]:
    """Returns the `tokenizer.json` that encodes texts to the same ids."""
    spelling = byte_spelling()

    def spelled(token: bytes) -> str:
        return ''.join(spelling[byte] for byte in token)

    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
    split = {'type': 'Split', 'pattern': {'Regex': encoding.pattern}, 'behavior': 'Isolated', 'invert': False}
    options = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    return {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': [
            {'id': index, 'content': text, **options}
            for text, index in sorted(encoding.special_tokens.items(), key=lambda item: item[1])
        ],
        'normalizer': None,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [split, byte_level]},
        'post_processor': None,
        'decoder': byte_level,
        'model': {
            'type': 'BPE',
            'dropout': None,
            'unk_token': None,
            'continuing_subword_prefix': None,
            'end_of_word_suffix': None,
            'fuse_unk': False,
            'byte_fallback': False,
            'ignore_merges': False,
            'vocab': {spelled(token): rank for token, rank in encoding.ranks.items()},
            'merges': [[spelled(left), spelled(right)] for left, right in _merges(encoding.ranks)],
        },
    }


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the pair that each token is merged from, in the order of the tokens.

    The file has only the tokens. A token's pair is what remains of its bytes after all merges of smaller rank.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            found = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            smallest = min(found)
            if smallest >= rank:
                break
            place = found.index(smallest)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) != 2:
            raise InputError(f'token {rank:,} of {FILE} is not a pair of earlier tokens; {_EXPORT}')
        merges.append((parts[0], parts[1]))
    return merges
