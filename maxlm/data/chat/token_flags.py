"""Marked tokens: ids that also say, in their top bits, whether they are predicted and where documents begin.

Conversations need both. Only what the assistant says is learned, and the token that ends its turn may be the very one
that ends documents elsewhere, so that the ends of documents cannot be told by an id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The bits of a marked token, a uint32. Ids are below both.
NOT_PREDICTED = np.uint32(1 << 31)
FIRST = np.uint32(1 << 30)
ID_BITS = np.uint32((1 << 30) - 1)


class TokenDocument(NamedTuple):
    """A document as it is written.

    Attributes:
        tokens: ids or marked tokens with the end of document, uint32 [number of tokens].
        turn_ends: of a conversation, numbers of tokens up to and with the ends of the assistant's turns, ascending;
            () of a pair of answers, two documents that stay together; None for a text, which may be cut anywhere.
    """

    tokens: np.ndarray
    turn_ends: tuple[int, ...] | None


def mark(ids: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """A document as marked tokens: uint32 [number of tokens].

    The first is never predicted: no document tells how the next begins.

    Args:
        ids: its token ids, [number of tokens].
        predicted: whether each counts as a target, bool [number of tokens].
    """
    marked = ids.astype(np.uint32)
    marked[~predicted] |= NOT_PREDICTED
    marked[:1] |= NOT_PREDICTED | FIRST
    return marked


def mark_stream(stream: np.ndarray, end_of_document: int) -> np.ndarray:
    """Marks a stream of ids in which `end_of_document` ends documents: all but the first of each is predicted.

    Its own first token stays unmarked, since a stream does not tell what is before it.
    """
    marked = stream.astype(np.uint32)
    marked[1:][stream[:-1] == end_of_document] |= NOT_PREDICTED | FIRST
    return marked


def ids_of(marked: np.ndarray) -> np.ndarray:
    """The ids of marked tokens, in their shape."""
    return marked & ID_BITS


def is_predicted(marked: np.ndarray) -> np.ndarray:
    """Whether each marked token counts as a target, bool in their shape."""
    return (marked & NOT_PREDICTED) == 0


def is_first(marked: np.ndarray) -> np.ndarray:
    """Whether each marked token begins a document, bool in their shape."""
    return (marked & FIRST) != 0
