"""Best-fit packing: assigns the documents of a shard to rows that begin at documents, as a pure function."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

# Increment this version if rows contain other documents. A run does not resume with other rows.
VERSION = 1
# Number of documents in which the search finds the next one of a row. More documents leave smaller gaps.
BUFFER_DOCUMENTS = 4096
# Keys of the search are length · STRIDE + (STRIDE - 1 - document), so the older of equal lengths is found first.
STRIDE = 2**32


class PackedRows(NamedTuple):
    """Documents of each row.

    Attributes:
        firsts: number of the first piece of each row, followed by the number of pieces, int64 [rows + 1].
        documents: document of each piece, in the order of the rows, int64 [pieces].
        lengths: number of tokens of each piece, int64 [pieces]. A piece is the beginning of its document.
    """

    firsts: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray


def pack_documents(lengths: np.ndarray, capacity: int, *, buffer_documents: int = BUFFER_DOCUMENTS) -> PackedRows:
    """Packs documents into rows of `capacity` tokens. Each document is used exactly once.

    The search is limited to a buffer of documents in their order. A row begins with the oldest document of the buffer,
    so every document is used, long ones included. The longest document that fits follows, until none fits. The shortest
    document, of which the fewest tokens are lost, then fills the rest. The remaining tokens of a cut document are
    discarded. Only the last row can be shorter than `capacity`.

    Best fit for documents: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", which cuts only documents
    longer than a row and pads.

    Args:
        lengths: number of tokens of each document, at least 1, [documents].
        capacity: number of tokens of a row.
        buffer_documents: number of documents in the buffer.
    """
    assert len(lengths) < STRIDE
    sizes = lengths.tolist()
    buffer: list[int] = []
    used = np.zeros(len(sizes), bool)
    oldest = added = 0
    firsts, documents, taken = [0], [], []

    def take(index: int, free: int) -> int:
        """Moves a document of the buffer to the row, cut to `free` tokens, and returns its number of tokens there."""
        length, key = divmod(buffer.pop(index), STRIDE)
        document = STRIDE - 1 - key
        used[document] = True
        documents.append(document)
        taken.append(min(length, free))
        return taken[-1]

    while oldest < len(sizes):
        free = capacity
        while free:
            while added < len(sizes) and len(buffer) < buffer_documents:
                bisect.insort(buffer, sizes[added] * STRIDE + STRIDE - 1 - added)
                added += 1
            if not buffer:
                break
            if free == capacity:
                index = bisect.bisect_left(buffer, sizes[oldest] * STRIDE + STRIDE - 1 - oldest)
            else:
                # The shortest document if all are longer than the free space.
                index = max(0, bisect.bisect_left(buffer, (free + 1) * STRIDE) - 1)
            free -= take(index, free)
        firsts.append(len(documents))
        while oldest < len(sizes) and used[oldest]:
            oldest += 1
    return PackedRows(np.array(firsts, np.int64), np.array(documents, np.int64), np.array(taken, np.int64))
