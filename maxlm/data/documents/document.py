"""The document: the unit that readers yield, filters process and the tokenizer encodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from maxlm.data.documents.conversation import Conversation
from maxlm.data.documents.preference import Preference
from maxlm.errors import InputError

# Called with the name of an unreadable record and the reason, which names the file, the record and a remedy.
OnBad = Callable[[str, str], None]


T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Document:
    """A text or token sequence that is trained on as one unit.

    Attributes:
        name: unique name in a data set, the same on every machine. Random choices use the hash of the name.
        source: name of the input. Shares and losses are reported by source.
        text: the text; empty if `tokens` is set.
        tokens: uint32 [number of tokens] without the end-of-document token, for pretokenized input.
        conversation: the conversation that `text` is the content of; None for other documents.
        preference: the preference pair that `text` is the content of; None for other documents.
        learned_from: number of characters at the beginning of `text` without loss. Requires tokens with flags.
        metadata: other fields of the record (language, URL, path, …) as JSON values.
    """

    name: str
    source: str
    text: str = ''
    tokens: np.ndarray | None = None
    conversation: Conversation | None = None
    preference: Preference | None = None
    learned_from: int = 0
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_divisible(self) -> bool:
        """Returns True if the document can be split into two documents."""
        return self.conversation is None and self.preference is None and not self.learned_from


def raise_bad(name: str, reason: str) -> None:
    """Raises InputError for an unreadable record. Readers use this if bad records may not be skipped."""
    raise InputError(f'{reason} (skip unreadable records with --skip-bad-records)')


def encode_each(
    encode: Callable[[Sequence[Document]], Sequence[T]], documents: Sequence[Document]
) -> Sequence[T | InputError]:
    """Returns `encode(documents)`. If it raises InputError, the result of each invalid document is its error.

    Args:
        encode: returns one result per document, which does not depend on the other documents.
        documents: the documents to encode.
    """
    try:
        return encode(documents)
    except InputError as error:
        if len(documents) == 1:
            return [error]
    return [result for document in documents for result in encode_each(encode, [document])]
