"""Fill-in-the-middle (FIM): splits some documents into three parts and reorders them.

After Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255). A text is
split at two characters and becomes one of

    prefix-suffix-middle (PSM):  <prefix> prefix <suffix> suffix <middle> middle
    suffix-prefix-middle (SPM):  <prefix> <suffix> suffix <middle> prefix middle

SPM is the second variant of the paper: PSM with an empty prefix, so that training on one also helps the other. The
parts are tokenized separately. Splitting at characters, before tokenization, lets the middle start and end inside a
word, like the cursor of an editor. Splitting between tokens would never train the completion of partial words.

An entire document is split once. If it is longer than the training sequences, a sequence contains only some parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError

# Shorter texts leave nothing to learn.
MIN_CHARACTERS = 3
# Random integers are uniform below this value.
_DRAW_RANGE = 2**64


@dataclasses.dataclass(frozen=True)
class FimConfig:
    """Proportions of fill-in-the-middle.

    Attributes:
        rate: proportion of documents that are reordered.
        spm_share: proportion of reordered documents that use SPM.
    """

    rate: float = 0.5
    spm_share: float = 0.5

    def __post_init__(self) -> None:
        """Raises InputError if a proportion is not between 0 and 1."""
        for name, rate in dataclasses.asdict(self).items():
            if not 0 <= rate <= 1:
                raise InputError(f'fill-in-the-middle {name}={rate}: must be from 0 to 1')


@dataclasses.dataclass(frozen=True)
class FimSplit:
    """Split text: `prefix + middle + suffix` is the original text. `suffix_first` selects SPM."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def split_text(name: str, text: str, infill: FimConfig) -> FimSplit | None:
    """Returns the split of the document `name`, or None if it is not split, as for texts below MIN_CHARACTERS.

    The result depends only on a hash of the name and on the text, so it is the same on every machine and for any number
    of workers. Both ends of the middle are uniform over the len(text) + 1 positions between characters, as in the
    paper. Each part may be empty.
    """
    if len(text) < MIN_CHARACTERS:
        return None
    # The salt makes this hash independent of the hash that selects validation documents. Hash bits are used because the
    # streams of NumPy's generators may change between versions.
    digest = hashlib.sha256(f'infill:{name}'.encode(errors='surrogateescape')).digest()
    rearranged, suffix_first, *ends = (int.from_bytes(digest[i : i + 8]) for i in range(0, 32, 8))
    if rearranged >= int(infill.rate * _DRAW_RANGE):
        return None
    start, stop = sorted(end * (len(text) + 1) // _DRAW_RANGE for end in ends)
    return FimSplit(text[:start], text[start:stop], text[stop:], suffix_first < int(infill.spm_share * _DRAW_RANGE))


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], infill: FimConfig | None) -> list[np.ndarray]:
    """Returns the token ids of each document without the end of document: uint32 arrays [number of tokens].

    Documents that are already tokenized are returned unchanged.

    Raises:
        InputError: `infill` is given, but a document is already tokenized or the tokenizer has no FIM tokens.
    """
    if infill is None:
        encoded = iter(tokenizer.encode_batch([document.text for document in documents if document.tokens is None]))
        return [next(encoded) if document.tokens is None else document.tokens for document in documents]
    ids = tokenizer.infill_ids
    if ids is None:
        raise InputError(
            'the tokenizer has no special tokens for fill-in-the-middle; use another tokenizer, or remove --fim-rate'
        )
    for document in documents:
        if document.tokens is not None:
            raise InputError(
                f'{document.name}: already tokenized, and fill-in-the-middle needs text; '
                'prepare token files separately, without --fim-rate'
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


def fim_fraction(tokens: np.ndarray, is_token: np.ndarray, fim_ids: Sequence[int], end_of_document: int) -> float:
    """Returns the fraction of the documents in a batch that are reordered; 0 if there are no documents.

    The parts of a document in two rows count as two documents. A part without special tokens counts as not reordered.

    Args:
        tokens: token ids [B, T].
        is_token: False for padding, [B, T].
        fim_ids: ids of the special tokens, see `Tokenizer.infill_ids`.
        end_of_document: id of the last token of a document.
    """
    is_start = np.ones(tokens.shape, bool)
    is_start[:, 1:] = tokens[:, :-1] == end_of_document
    document = np.cumsum(is_start)
    is_fim = np.isin(tokens, fim_ids) & is_token
    num_documents = int(np.count_nonzero(is_start & is_token))
    return len(np.unique(document[is_fim.reshape(-1)])) / max(1, num_documents)
