"""Sequence packing of conversations and preference pairs, each of which stays complete.

The algorithm is online best fit: each conversation goes into the fullest open sequence with enough space. A sequence
is written when it is full, or when too many sequences are open. The result depends only on the conversations and their
order.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

import numpy as np

from maxlm.data.chat.token_flags import DOCUMENT_START_BIT, ID_MASK, IGNORE_BIT, TokenDocument

# Maximum number of open sequences. More would reduce padding but need more memory.
MAX_OPEN_SEQUENCES = 512


@dataclasses.dataclass
class ChatCounts:
    """Counts of the conversations of a split.

    Attributes:
        predicted: number of tokens that are targets of the loss.
        padding: number of padding tokens.
        shortened: number of conversations that were cut at the end of a turn.
        left_out: number of conversations that were skipped because no turn of the assistant fits into a sequence.
    """

    predicted: int = 0
    padding: int = 0
    shortened: int = 0
    left_out: int = 0

    def add(self, other: ChatCounts) -> None:
        """Adds the counts of another part of the split."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass
class PairCounts(ChatCounts):
    """Counts of the preference pairs of a split. `left_out` counts pairs longer than a sequence; no pair is shortened.

    Attributes:
        undecided: number of pairs that were skipped because the answers are equal or one is empty.
        labeled: number of single answers with a label, which count as pairs in the other counts.
    """

    undecided: int = 0
    labeled: int = 0


def num_labeled(chat: Mapping[str, Mapping[str, int]]) -> int:
    """Returns the number of single answers with a label in a data set; see `DatasetManifest.chat`."""
    return sum(counts.get('labeled', 0) for counts in chat.values())


class Packer:
    """Packs documents into consecutive sequences of `seq_len` tokens with flags.

    A longer conversation is cut after the last turn of the assistant that fits. A longer preference pair is skipped. A
    longer text is split into sequences. The rest of a sequence is padded with end-of-document tokens, which form their
    own document and are not targets of the loss. The first token of a sequence is a target only if the sequence before
    it ends with the end of a document.
    """

    def __init__(self, seq_len: int, *, end_of_document: int, counts: ChatCounts):
        self._seq_len = seq_len
        self._end = np.uint32(end_of_document) | IGNORE_BIT
        self._counts = counts
        # Ascending (free tokens, number of the sequence), and the documents of each open sequence.
        self._free: list[tuple[int, int]] = []
        self._open: dict[int, list[np.ndarray]] = {}
        self._next = 0
        # True if the sequences so far end with the end of a document.
        self._has_end = False

    def add(self, document: TokenDocument) -> list[np.ndarray]:
        """Adds a document. Returns the documents of the completed sequences; the last of each includes the padding."""
        done: list[np.ndarray] = []
        for part in self._parts(document):
            place = bisect.bisect_left(self._free, (len(part), 0))
            if place < len(self._free):
                free, number = self._free.pop(place)
            else:
                free, number = self._seq_len, self._next
                self._next += 1
            self._open.setdefault(number, []).append(part)
            bisect.insort(self._free, (free - len(part), number))
            if self._free[0][0] == 0 or len(self._free) > MAX_OPEN_SEQUENCES:
                done += self._close()
        return done

    def finish(self) -> list[np.ndarray]:
        """Returns the documents of all open sequences."""
        done: list[np.ndarray] = []
        while self._free:
            done += self._close()
        return done

    def _close(self) -> list[np.ndarray]:
        """Returns the documents of the fullest sequence."""
        free, number = self._free.pop(0)
        documents = self._open.pop(number)
        if not self._has_end:
            documents[0] = documents[0].copy()
            documents[0][0] |= IGNORE_BIT
        if free:
            padding = np.full(free, self._end, np.uint32)
            padding[0] |= DOCUMENT_START_BIT
            # The padding is appended to the last document, so that it is not counted as a document.
            documents[-1] = np.concatenate([documents[-1], padding])
            self._counts.padding += free
        self._has_end = bool(documents[-1][-1] & ID_MASK == self._end & ID_MASK)
        return documents

    def _parts(self, document: TokenDocument) -> list[np.ndarray]:
        tokens, seq_len = document.tokens, self._seq_len
        if len(tokens) <= seq_len:
            return [tokens]
        if document.turn_ends is None:
            parts = [tokens[start : start + seq_len].copy() for start in range(0, len(tokens), seq_len)]
            for part in parts[1:]:
                part[0] |= DOCUMENT_START_BIT | IGNORE_BIT
            return parts
        # Space for the end-of-document token, unless the turn ends with it.
        end = self._end & ~IGNORE_BIT
        fits = [stop for stop in document.turn_ends if stop + int(tokens[stop - 1] != end) <= seq_len]
        if not fits:
            self._counts.left_out += 1
            return []
        self._counts.shortened += 1
        stop = fits[-1]
        return [tokens[:stop] if tokens[stop - 1] == end else np.append(tokens[:stop], self._end)]
