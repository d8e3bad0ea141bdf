"""A document: what every reader yields, what is cleaned, and what is tokenized as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from maxlm.data.documents.conversation import Conversation
from maxlm.data.documents.preference import Preference
from maxlm.errors import InputError

# Called with the name of what cannot be read, and a reason that names the file (and record) and what would be right.
OnBad = Callable[[str, str], None]


T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, or a text that is tokenized already, that is trained on as a whole.

    Attributes:
        name: unique in a data set and the same on every machine; what is chosen at random is chosen by its hash.
        source: name of the input that it is from; shares and losses are told by source.
        text: empty where `tokens` are given.
        tokens: uint32 [number of tokens] without the end of document, for input that is tokenized already.
        conversation: what `text` is without who says it; None for a text.
        preference: what `text` is of a prompt and two answers; None for all else.
        learned_from: characters at the beginning of `text` that are read and not learned; needs marked tokens.
        metadata: what else the record holds (language, URL, path, …), as JSON values.
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
        """Returns whether the document can be split into two documents."""
        return self.conversation is None and self.preference is None and not self.learned_from


def raise_bad(name: str, reason: str) -> None:
    """The strict way to meet the bad document `name`: the reading ends."""
    raise InputError(f'{reason} (--skip-bad-records leaves out what cannot be read)')


def encode_each(
    encode: Callable[[Sequence[Document]], Sequence[T]], documents: Sequence[Document]
) -> Sequence[T | InputError]:
    """Returns `encode(documents)`; where it raises InputError, each document at fault has its error as the result.

    Args:
        encode: returns one result for each document, which does not depend on the other documents.
        documents: those to encode.
    """
    try:
        return encode(documents)
    except InputError as error:
        if len(documents) == 1:
            return [error]
    return [result for document in documents for result in encode_each(encode, [document])]
