"""Fill in the middle: some documents are cut in three and put in another order, so that a model learns to fill a hole.

After Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255). A text is
cut at two characters and becomes one of

    prefix-suffix-middle (PSM):  <prefix> prefix <suffix> suffix <middle> middle
    suffix-prefix-middle (SPM):  <prefix> <suffix> suffix <middle> prefix middle

SPM in their second variant: it is PSM with an empty prefix, so that what is learned from one serves the other. The
parts are tokenized separately: cut by characters, before tokenizing, a hole may begin and end inside a word, as the
cursor of an editor does. Cut between tokens, the model would never see the half words that it is asked to complete.

A document is cut as a whole. One that is longer than the context of training gives windows that hold only some parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError

# Fewer leave nothing to learn from.
MIN_CHARACTERS = 3
# Draws are uniform below this.
_DRAW_RANGE = 2**64


@dataclasses.dataclass(frozen=True)
class FimConfig:
    """How much is rearranged.

    Attributes:
        rate: share of the documents.
        spm_share: share of these that put the suffix first.
    """

    rate: float = 0.5
    spm_share: float = 0.5

    def __post_init__(self) -> None:
        """Raises InputError when one is not a share."""
        for name, share in dataclasses.asdict(self).items():
            if not 0 <= share <= 1:
                raise InputError(f'infill {name}={share}: needs a share from 0 to 1')


@dataclasses.dataclass(frozen=True)
class FimSplit:
    """A text with a hole: `prefix + middle + suffix` is the text; `suffix_first` asks for SPM."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def split_text(name: str, text: str, infill: FimConfig) -> FimSplit | None:
    """How the document `name` is cut, None where it stays as it is, like all below MIN_CHARACTERS.

    All follows from a hash of the name: the same on every machine, for any number of workers. Both ends of the hole
    are uniform over the len(text) + 1 places between characters, as in the paper; each part may be empty.
    """
    if len(text) < MIN_CHARACTERS:
        return None
    # The salt: independent of the hash that chooses what is validated on. Bits of a hash and not of NumPy's
    # generators, whose streams may change between its versions.
    digest = hashlib.sha256(f'infill:{name}'.encode(errors='surrogateescape')).digest()
    rearranged, suffix_first, *ends = (int.from_bytes(digest[i : i + 8]) for i in range(0, 32, 8))
    if rearranged >= int(infill.rate * _DRAW_RANGE):
        return None
    start, stop = sorted(end * (len(text) + 1) // _DRAW_RANGE for end in ends)
    return FimSplit(text[:start], text[start:stop], text[stop:], suffix_first < int(infill.spm_share * _DRAW_RANGE))


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], infill: FimConfig | None) -> list[np.ndarray]:
    """Token ids of each document, without the end of document: uint32 arrays [number of tokens].

    Documents that are tokenized already are passed through.

    Raises:
        InputError: `infill` is asked for, and a document is tokenized already or the tokenizer has no tokens for it.
    """
    if infill is None:
        encoded = iter(tokenizer.encode_batch([document.text for document in documents if document.tokens is None]))
        return [next(encoded) if document.tokens is None else document.tokens for document in documents]
    ids = tokenizer.infill_ids
    if ids is None:
        raise InputError('the tokenizer has no special tokens for fill-in-the-middle')
    for document in documents:
        if document.tokens is not None:
            raise InputError(
                f'{document.name}: is tokenized already, and fill-in-the-middle cuts text; '
                'prepare tokens as a data set of their own, without it'
            )

    splits = [split_text(document.name, document.text, infill) for document in documents]
    beginnings = [split.prefix if split else document.text for document, split in zip(documents, splits, strict=True)]
    others = [part for split in splits if split for part in (split.middle, split.suffix)]
    begins, inner = iter(tokenizer.encode_batch(beginnings)), iter(tokenizer.encode_batch_inside(others))
    prefix_id, middle_id, suffix_id = (np.array([i], np.uint32) for i in ids)

    def joined(split: FimSplit | None) -> np.ndarray:
        prefix = next(begins)
        if split is None:
            return prefix
        middle, suffix = next(inner), next(inner)
        if split.suffix_first:
            return np.concatenate([prefix_id, suffix_id, suffix, middle_id, prefix, middle])
        return np.concatenate([prefix_id, prefix, suffix_id, suffix, middle_id, middle])

    return [joined(split) for split in splits]
