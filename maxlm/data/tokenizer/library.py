"""Functions of the `tokenizers` library that `Tokenizer` uses: loading a `tokenizer.json`, encoding and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from maxlm.data.tokenizer.limits.expansion import check_limits, regexes_of
from maxlm.data.tokenizer.limits.regular_expressions import check_regex
from maxlm.errors import InputError, surrogate_in
from maxlm.storage.errors import RustPanicError, catch_panics
from maxlm.storage.json_text import parse_json

# Maximum number of unused ids of a tokenizer.json, in addition to one unused id per used id. Embeddings have a row for
# each unused id.
MAX_UNUSED_IDS = 2**16


def load_library(text: str, name: str) -> tokenizers.Tokenizer:
    """Loads the content of a `tokenizer.json` after checking its limits. Error messages call it `name`.

    Raises:
        InputError: the content is not a tokenizer, or exceeds a limit.
    """
    try:
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise InputError('is not a JSON object; give another file')
        # Check before loading: the library creates a table of all ids, and normalizes the added tokens.
        refuse_gaps(fields)
        check_limits(fields)
        for regex in regexes_of(fields):
            check_regex(regex)
        with catch_panics('tokenizers'):
            library = tokenizers.Tokenizer.from_str(text)
            only_map(library)
    except InputError as error:
        raise InputError(f'{name}: {error}') from error
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f'{name} is not a tokenizer.json: {" ".join(str(error).split())[:300]}; give another file'
        ) from error
    return library


def only_map(library: tokenizers.Tokenizer) -> None:
    """Switches off options of a tokenizer.json that do not belong to the mapping from text to ids."""
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, 'dropout', None) is not None:
        library.model.dropout = None


def encode_batch(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of each text, uint32 [number of tokens], without added tokens.

    Raises:
        InputError: a text has no ids.
    """
    try:
        with catch_panics('tokenizers'):
            encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        for text in texts:
            if (place := surrogate_in(text)) >= 0:
                raise InputError(f'the text is not valid UTF-8 at character {place}; remove the character') from error
        raise InputError(f'the tokenizer cannot encode a text: {error}; use another tokenizer') from error
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def decode(library: tokenizers.Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of token ids, with special tokens by name.

    Raises:
        InputError: the library panics on the ids.
    """
    try:
        with catch_panics('tokenizers'):
            return library.decode(ids, skip_special_tokens=False)
    except RustPanicError as error:
        raise InputError(f'the tokenizer cannot decode ids: {error}; use another tokenizer') from error


def refuse_gaps(fields: Mapping[str, Any]) -> None:
    """Raises InputError if the ids of a tokenizer.json have large gaps. The library detects other mistakes."""
    model, added = fields.get('model'), fields.get('added_tokens')
    vocab = model.get('vocab') if isinstance(model, dict) else None
    # A Unigram vocabulary is a list in the order of the ids.
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab) if isinstance(vocab, list) else 0))
    ids += [token.get('id') for token in (added if isinstance(added, list) else []) if isinstance(token, dict)]
    numbers = {i for i in ids if isinstance(i, int)}
    largest = max(numbers, default=0)
    if largest > 2 * len(numbers) + MAX_UNUSED_IDS:
        raise InputError(
            f'has {len(numbers):,} tokens with ids up to {largest:,}: the gaps are too large, since a model has a row '
            'for each id; number the tokens from 0'
        )
