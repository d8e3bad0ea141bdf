"""Encodes texts whose special-token names become ids, as rendered chats and fill-in-the-middle prompts need.

`Tokenizer.encode_batch` encodes these names as text, because a text of unknown origin must not control the model.
"""

from __future__ import annotations

import functools

import numpy as np
import tokenizers

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, surrogate_in
from maxlm.storage.errors import catch_panics


def encode_with_special(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the token ids of a text whose special-token names become ids: uint32 [number of tokens].

    They equal those of Transformers' `tokenizer(text, add_special_tokens=False)`: a special token with `lstrip` or
    `rstrip` includes the whitespace beside it. For the kind `ids`, the result is that of `Tokenizer.encode_batch`.

    Raises:
        InputError: the text has no ids: it contains a surrogate, or the library panics on it.
    """
    if tokenizer.kind == 'ids':
        # Its special tokens are named by numbers, which are also parts of other numbers.
        return tokenizer.encode_batch([text])[0]
    try:
        with catch_panics('tokenizers'):
            ids = _library(tokenizer).encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises bare Exception
        if (place := surrogate_in(text)) >= 0:
            raise InputError(f'the text is not valid UTF-8 at character {place}; remove the character') from error
        raise InputError(f'the tokenizer cannot encode a text: {error}; use another tokenizer') from error
    return np.array(ids, np.uint32)


@functools.lru_cache(8)
def _library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer, which recognizes special tokens by default."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    # A tokenizer.json may store both, but they are no part of the mapping from text to ids.
    library.no_truncation()
    library.no_padding()
    return library
