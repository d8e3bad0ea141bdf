"""Loss mask in token ids. The top bits mark tokens that are no targets and tokens that start documents.

Conversations need both flags. The loss covers only messages of the assistant. The token at the end of a turn may be the
end-of-document token, so document boundaries cannot be found by id.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    If the first token is a target, the end of the document before it predicts it.

    Args:
        ids: token ids, [number of tokens].
        predicted: True for targets of the loss, bool [number of tokens].
    """
    marked = ids.astype(np.uint32)
    marked[~predicted] |= IGNORE_BIT
    marked[:1] |= DOCUMENT_START_BIT
    return marked


def encode_stream_flags(
    stream: np.ndarray,
    end_of_document: int,
    *,
    train_first_token: bool = True,
    beginning_of_document: Sequence[int] = (),
) -> np.ndarray:
    """Adds flags to a stream in which `end_of_document` ends documents. See `are_targets` for the other arguments.

    The first token of the stream gets no flags, because the token before it is unknown.
    """
    marked = stream.astype(np.uint32)
    marked[1:][stream[:-1] == end_of_document] |= DOCUMENT_START_BIT
    targets = are_targets(
        stream,
        end_of_document,
        train_first_token=train_first_token,
        beginning_of_document=beginning_of_document,
    )
    marked[1:][~targets] |= IGNORE_BIT
    return marked


def are_targets(
    stream: np.ndarray, end_of_document: int, *, train_first_token: bool, beginning_of_document: Sequence[int]
) -> np.ndarray:
    """Returns True for each token after the first of a stream that is a target of the loss.

    Args:
        stream: ids without flags, [..., n].
        end_of_document: id after each document.
        train_first_token: the first token of a document is a target, which the end-of-document token predicts.
        beginning_of_document: ids that the tokenizer writes before each text. They are given and never targets.

    Returns:
        bool [..., n - 1].
    """
    if train_first_token:
        targets = np.ones_like(stream[..., 1:], bool)
    else:
        targets = stream[..., :-1] != end_of_document
    return targets & ~np.isin(stream[..., 1:], beginning_of_document) if len(beginning_of_document) else targets


def token_ids(marked: np.ndarray) -> np.ndarray:
    """Returns the ids of tokens with flags, of the same shape."""
    return marked & ID_MASK


def is_target(marked: np.ndarray) -> np.ndarray:
    """Returns True for each token that is a target of the loss, bool of the same shape."""
    return (marked & IGNORE_BIT) == 0


def is_document_start(marked: np.ndarray) -> np.ndarray:
    """Returns True for each token that starts a document, bool of the same shape."""
    return (marked & DOCUMENT_START_BIT) != 0
