"""Functions of the `tokenizers` library that `Tokenizer` uses: encoding, and checks of a `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from maxlm.errors import InputError, surrogate_in
from maxlm.storage.errors import catch_panics

# Maximum number of unused ids of a tokenizer.json, in addition to one unused id per used id. Embeddings have a row for
# each unused id.
MAX_UNUSED_IDS = 2**16


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


def refuse_gaps(facts: Any) -> None:
    """Raises InputError if the ids of a tokenizer.json have large gaps. The library detects other mistakes."""
    parts = facts if isinstance(facts, dict) else {}
    model, added = parts.get('model'), parts.get('added_tokens')
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
