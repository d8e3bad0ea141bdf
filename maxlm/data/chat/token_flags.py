"""Loss masks in token ids: their top bits say whether a token is a target and where documents begin.

Conversations need both. Only what the assistant says is learned, and the token that ends its turn may be the very one
that ends documents elsewhere, so that the ends of documents cannot be told by an id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The bits of a marked token, a uint32. Ids are below both.
IGNORE_BIT = np.uint32(1 << 31)
DOCUMENT_START_BIT = np.uint32(1 << 30)
ID_MASK = np.uint32((1 << 30) - 1)


class TokenDocument(NamedTuple):
    """A document as it is written.

    Attributes:
        tokens: ids or marked tokens with the end of document, uint32 [number of tokens].
        turn_ends: of a conversation, numbers of tokens up to and with the ends of the assistant's turns, ascending;
            () of a pair of answers, two documents that stay together; None for a text, which may be cut anywhere.
    """

    tokens: np.ndarray
    turn_ends: tuple[int, ...] | None


def encode_flags(ids: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """A document as marked tokens: uint32 [number of tokens].

    The first is never predicted: no document tells how the next begins.

    Args:
        ids: its token ids, [number of tokens].
        predicted: whether each counts as a target, bool [number of tokens].
    """
    marked = ids.astype(np.uint32)
    marked[~predicted] |= IGNORE_BIT
    marked[:1] |= IGNORE_BIT | DOCUMENT_START_BIT
    return marked


def encode_stream_flags(stream: np.ndarray, end_of_document: int) -> np.ndarray:
    """Marks a stream of ids in which `end_of_document` ends documents: all but the first of each is predicted.

    Its own first token stays unmarked, since a stream does not tell what is before it.
    """
    marked = stream.astype(np.uint32)
    marked[1:][stream[:-1] == end_of_document] |= IGNORE_BIT | DOCUMENT_START_BIT
    return marked


def token_ids(marked: np.ndarray) -> np.ndarray:
    """The ids of marked tokens, in their shape."""
    return marked & ID_MASK


def is_target(marked: np.ndarray) -> np.ndarray:
    """Whether each marked token counts as a target, bool in their shape."""
    return (marked & IGNORE_BIT) == 0


def is_document_start(marked: np.ndarray) -> np.ndarray:
    """Whether each marked token begins a document, bool in their shape."""
    return (marked & DOCUMENT_START_BIT) != 0
