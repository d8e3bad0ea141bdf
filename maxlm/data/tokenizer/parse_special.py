"""Encodes texts whose special-token names become ids, as rendered chats and fill-in-the-middle prompts need.

`Tokenizer.encode_batch` encodes these names as text, because a text of unknown origin must not control the model.
"""

from __future__ import annotations

import functools

import numpy as np
import tokenizers

from maxlm.data.tokenizer.library import only_map
from maxlm.data.tokenizer.limited_encoding import encode_long
from maxlm.data.tokenizer.tokenizer import Tokenizer


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
    return encode_long(_library(tokenizer), [text])[0]


@functools.lru_cache(8)
def _library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer, which recognizes special tokens by default, with the flags of the file."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    only_map(library)
    # The files of a model may name a token of the vocabulary that tokenizer.json does not mark as special.
    added = library.get_added_tokens_decoder()
    library.add_special_tokens([token for index, token in tokenizer.special_tokens.items() if index not in added])
    return library
