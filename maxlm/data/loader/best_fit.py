"""Best-fit packing: assigns the documents of a shard to rows that begin at documents, as a pure function."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

# Increment this version if rows contain other documents, together with those of `maxlm.data.loader.document_rows`.
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
        starts: first token of each piece within its document, int64 [pieces]. Above 0 only at the beginning of a row.
        lengths: number of tokens of each piece, int64 [pieces].
    """

    firsts: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def pack_documents(
    lengths: np.ndarray, capacity: int, *, keeps_rests: bool, buffer_documents: int = BUFFER_DOCUMENTS
) -> PackedRows:
    """Packs documents into rows of `capacity` tokens. Only the last row can be shorter. Each document is used once.

    The search is limited to a buffer of documents in their order. A row begins with the oldest document of the buffer,
    so every document is used, long ones included. The longest document that fits follows, until none fits. Then a
    document is cut to fill the row:

    - Without `keeps_rests` this is the shortest document, of which the fewest tokens are lost. What remains of a cut
      document is discarded, so each row begins at a document.
    - With `keeps_rests` this is the oldest document. What remains of it begins the next row, so no token is lost.

    Best fit for documents: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", which cuts only documents
    longer than a row, and pads.

    Args:
        lengths: number of tokens of each document, at least 1, [documents].
        capacity: number of tokens of a row.
        keeps_rests: what remains of a cut document begins the next row.
        buffer_documents: number of documents in the buffer.
    """
    assert len(lengths) < STRIDE
    sizes = lengths.tolist()
    # Sorted keys of the documents in the buffer.
    buffer: list[int] = []
    used = np.zeros(len(sizes), bool)
    oldest = added = document = start = 0
    firsts, pieces = [0], list[tuple[int, int, int]]()

    def key_of(document: int) -> int:
        return int(sizes[document] * STRIDE + STRIDE - 1 - document)

    while oldest < len(sizes) or start:
        free = capacity
        while free:
            while added < len(sizes) and len(buffer) < buffer_documents:
                bisect.insort(buffer, key_of(added))
                added += 1
            if not start:
                if not buffer:
                    break
                # The longest document that fits.
                index = bisect.bisect_left(buffer, (free + 1) * STRIDE) - 1
                if free == capacity or (index < 0 and keeps_rests):
                    index = bisect.bisect_left(buffer, key_of(oldest))
                document = STRIDE - 1 - buffer.pop(max(0, index)) % STRIDE
                used[document] = True
                while oldest < len(sizes) and used[oldest]:
                    oldest += 1
            length = min(sizes[document] - start, free)
            pieces.append((document, start, length))
            free -= length
            start = start + length if keeps_rests and start + length < sizes[document] else 0
        firsts.append(len(pieces))
    documents, starts, taken = np.array(pieces, np.int64).reshape(-1, 3).T
    return PackedRows(np.array(firsts, np.int64), documents, starts, taken)
