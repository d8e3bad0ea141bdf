"""Special tokens: end of document, fill-in-the-middle (FIM) and chat tokens.

Text is never encoded to a token that is marked special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from maxlm.errors import InputError

END_OF_DOCUMENT = '<|endoftext|>'
# Accepted names for tokenizers from other sources, in order of preference.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    '</s>',
    '<|end_of_text|>',
    '<eos>',
    '<|eos|>',
    '<｜end▁of▁sentence｜>',
    # nanochat only has a token that starts documents. In a stream of documents, it separates two documents like an end
    # token: the model predicts it after a text. It is last, because most tokenizers have both kinds of token.
    '<|bos|>',
)


class InfillNames(NamedTuple):
    """Names of the special tokens before the prefix, the middle and the suffix of a FIM document."""

    prefix: str
    middle: str
    suffix: str


class InfillIds(NamedTuple):
    """Ids of the special tokens before the prefix, the middle and the suffix of a FIM document."""

    prefix: int
    middle: int
    suffix: int


# Names added to tokenizers without FIM tokens, as in Qwen and CodeGemma.
INFILL = InfillNames('<|fim_prefix|>', '<|fim_middle|>', '<|fim_suffix|>')
# Accepted names for tokenizers from other sources, in order of preference.
INFILL_NAMES = (
    INFILL,
    # StarCoder.
    InfillNames('<fim_prefix>', '<fim_middle>', '<fim_suffix>'),
    # SantaCoder.
    InfillNames('<fim-prefix>', '<fim-middle>', '<fim-suffix>'),
    # Code Llama.
    InfillNames('▁<PRE>', '▁<MID>', '▁<SUF>'),
    # The names of DeepSeek refer to positions in the text: `begin` prefix `hole` suffix `end` middle.
    InfillNames('<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜fim▁hole｜>'),
)


def find_end_of_document(library: tokenizers.Tokenizer) -> int:
    """Returns the id of the end-of-document token.

    Raises:
        InputError: the tokenizer has no such special token.
    """
    special = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
    for name in END_OF_DOCUMENT_NAMES:
        if name in special:
            return special[name]
    raise InputError(
        f'the tokenizer has no special token that ends a document; add one of {" ".join(END_OF_DOCUMENT_NAMES)}'
    )


def find_infill_ids(library: tokenizers.Tokenizer) -> InfillIds | None:
    """Returns the ids of the FIM tokens if `library` has all three."""
    added = {token.content: i for i, token in library.get_added_tokens_decoder().items()}
    for names in INFILL_NAMES:
        if all(name in added for name in names):
            return InfillIds(*(added[name] for name in names))
    return None


def add_special_tokens(library: tokenizers.Tokenizer, names: Sequence[str]) -> None:
    """Makes `names` special tokens. Names without a token get new ids after all existing ids.

    Raises:
        InputError: the existing ids have gaps, so the new ids would not be the last.
    """
    vocab = library.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    new = [name for name in dict.fromkeys(names) if name not in vocab]
    library.add_special_tokens(list(names))
    if [library.token_to_id(name) for name in new] != list(range(size, size + len(new))):
        raise InputError(
            f'cannot add {" ".join(new)} to the tokenizer: its {len(vocab):,} ids below {size:,} have gaps; '
            'number its tokens without gaps'
        )


def add_infill_tokens(library: tokenizers.Tokenizer) -> None:
    """Adds the INFILL tokens after all existing ids if `library` has no FIM tokens.

    Raises:
        InputError: the existing ids have gaps, or one of the names exists, so the new ids would not be the last.
    """
    if find_infill_ids(library):
        return
    before = library.get_vocab(with_added_tokens=True)
    size = max(before.values(), default=-1) + 1
    library.add_special_tokens(list(INFILL))
    if find_infill_ids(library) != InfillIds(size, size + 1, size + 2):
        raise InputError(
            f'cannot add {" ".join(INFILL)} to the tokenizer: its {len(before):,} ids below {size:,} '
            'have gaps, or one of the names exists; rename that token, or number the tokens without gaps'
        )
