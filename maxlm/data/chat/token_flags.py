"""Loss masks in token ids. The top bits mark tokens that are no targets and tokens that start documents.

Conversations need both flags. The loss covers only messages of the assistant. The token at the end of a turn may be the
end-of-document token, so document boundaries cannot be found by id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Flags of a token, which is a uint32. Ids are smaller than both flags.
IGNORE_BIT = np.uint32(1 << 31)
DOCUMENT_START_BIT = np.uint32(1 << 30)
ID_MASK = np.uint32((1 << 30) - 1)


class TokenDocument(NamedTuple):
    """A tokenized document.

    Attributes:
        tokens: ids or tokens with flags, including the end-of-document token, uint32 [number of tokens].
        turn_ends: for a conversation, the ascending ends of the assistant's turns as numbers of tokens; () for a
            preference pair, whose two documents stay together; None for a text, which may be split anywhere.
    """

    tokens: np.ndarray
    turn_ends: tuple[int, ...] | None


def encode_flags(ids: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Adds flags to the tokens of a document: uint32 [number of tokens].

    The first token is never a target, because a document does not predict the beginning of the next document.

    Args:
        ids: token ids, [number of tokens].
        predicted: True for targets of the loss, bool [number of tokens].
    """
    marked = ids.astype(np.uint32)
    marked[~predicted] |= IGNORE_BIT
    marked[:1] |= IGNORE_BIT | DOCUMENT_START_BIT
    return marked


def encode_stream_flags(stream: np.ndarray, end_of_document: int) -> np.ndarray:
    """Adds flags to a stream in which `end_of_document` ends documents. The first token of each document is no target.

    The first token of the stream gets no flags, because the token before it is unknown.
    """
    marked = stream.astype(np.uint32)
    marked[1:][stream[:-1] == end_of_document] |= IGNORE_BIT | DOCUMENT_START_BIT
    return marked


def token_ids(marked: np.ndarray) -> np.ndarray:
    """Returns the ids of tokens with flags, of the same shape."""
    return marked & ID_MASK


def is_target(marked: np.ndarray) -> np.ndarray:
    """Returns True for each token that is a target of the loss, bool of the same shape."""
    return (marked & IGNORE_BIT) == 0


def is_document_start(marked: np.ndarray) -> np.ndarray:
    """Returns True for each token that starts a document, bool of the same shape."""
    return (marked & DOCUMENT_START_BIT) != 0
