"""Special tokens: what ends a document, what fill-in-the-middle joins the parts of one with, and what chats have.

Only a token that is marked special is never made from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from maxlm.errors import InputError

END_OF_DOCUMENT = '<|endoftext|>'
# In order of preference, for a tokenizer.json from elsewhere.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    '</s>',
    '<|end_of_text|>',
    '<eos>',
    '<|eos|>',
    '<｜end▁of▁sentence｜>',
    # nanochat has only a token that begins documents. In a stream of documents it stands between any two, like one that
    # ends them: after a text the model predicts it. Last, since most tokenizers have both and mean the other.
    '<|bos|>',
)


class InfillNames(NamedTuple):
    """Spellings of the tokens that stand before the prefix, the middle and the suffix of a text with a hole."""

    prefix: str
    middle: str
    suffix: str


class InfillIds(NamedTuple):
    """Ids of the tokens that stand before the prefix, the middle and the suffix of a text with a hole."""

    prefix: int
    middle: int
    suffix: int


# What a tokenizer gets that has none; the names of Qwen and CodeGemma.
INFILL = InfillNames('<|fim_prefix|>', '<|fim_middle|>', '<|fim_suffix|>')
# In order of preference, for a tokenizer.json from elsewhere.
INFILL_NAMES = (
    INFILL,
    # StarCoder.
    InfillNames('<fim_prefix>', '<fim_middle>', '<fim_suffix>'),
    # SantaCoder.
    InfillNames('<fim-prefix>', '<fim-middle>', '<fim-suffix>'),
    # Code Llama.
    InfillNames('▁<PRE>', '▁<MID>', '▁<SUF>'),
    # DeepSeek names places in the text: `begin` prefix `hole` suffix `end` middle.
    InfillNames('<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜fim▁hole｜>'),
)


def find_end_of_document(library: tokenizers.Tokenizer) -> int:
    """The id that ends documents.

    Raises:
        InputError: no special token does.
    """
    special = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
    for name in END_OF_DOCUMENT_NAMES:
        if name in special:
            return special[name]
    raise InputError(
        f'the tokenizer has no special token that ends a document: one of {" ".join(END_OF_DOCUMENT_NAMES)}'
    )


def find_infill_ids(library: tokenizers.Tokenizer) -> InfillIds | None:
    """The ids of fill-in-the-middle where `library` has all three; marks them special where the file did not.

    Qwen and DeepSeek leave them unmarked, so that text which spells them would become them.
    """
    added = {token.content: i for i, token in library.get_added_tokens_decoder().items()}
    for names in INFILL_NAMES:
        if all(name in added for name in names):
            library.add_special_tokens(list(names))
            return InfillIds(*(added[name] for name in names))
    return None


def add_special_tokens(library: tokenizers.Tokenizer, names: Sequence[str]) -> None:
    """Makes `names` special; those that are no tokens yet get ids after all others, which stay as they are.

    Raises:
        InputError: the ids have gaps, so that the new ones would not come last.
    """
    vocab = library.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    new = [name for name in dict.fromkeys(names) if name not in vocab]
    library.add_special_tokens(list(names))
    if [library.token_to_id(name) for name in new] != list(range(size, size + len(new))):
        raise InputError(
            f'the tokenizer cannot be given {" ".join(new)} after its {len(vocab):,} ids below {size:,}: the ids have '
            'gaps'
        )


def add_infill_tokens(library: tokenizers.Tokenizer) -> None:
    """Adds INFILL after the ids that are there, which stay as they are; does nothing where there are such tokens.

    Raises:
        InputError: the ids have gaps, or one of the names is taken, so that the new ones would not come last.
    """
    if find_infill_ids(library):
        return
    before = library.get_vocab(with_added_tokens=True)
    size = max(before.values(), default=-1) + 1
    library.add_special_tokens(list(INFILL))
    if find_infill_ids(library) != InfillIds(size, size + 1, size + 2):
        raise InputError(
            f'the tokenizer cannot be given {" ".join(INFILL)} after its {len(before):,} ids below {size:,}: '
            'the ids have gaps, or one of the names is taken'
        )
