"""Packing: whole conversations, or pairs of answers, put together into windows of a fixed length.

Online best fit: a conversation goes into the fullest of the open windows that has room for it. Windows are written as
they fill up; what is written depends on the conversations and their order alone.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from maxlm.data.chat.token_flags import DOCUMENT_START_BIT, IGNORE_BIT, TokenDocument

# Windows that wait for what still fits. More would leave less padding, and take memory: each is a window of tokens.
OPEN_WINDOWS = 512


@dataclasses.dataclass
class ChatCounts:
    """What became of the conversations of a split.

    Attributes:
        predicted: tokens that are learned.
        padding: tokens that only fill up windows.
        shortened: conversations that were cut at the end of a turn.
        left_out: conversations of which no turn of the assistant fits into a window.
    """

    predicted: int = 0
    padding: int = 0
    shortened: int = 0
    left_out: int = 0

    def add(self, other: ChatCounts) -> None:
        """Counts in those of another part of the split."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass
class PairCounts(ChatCounts):
    """What became of the pairs of answers of a split; `left_out` are those longer than a window, none is shortened.

    Attributes:
        undecided: pairs that are left out since both answers are the same, or one is empty.
    """

    undecided: int = 0


class Packer:
    """Whole conversations → windows of `window` marked tokens, which follow each other in a shard.

    A conversation that is longer is cut behind the last turn of the assistant that fits; a pair of answers is left out.
    A text that is longer is cut into windows. What is left of a window is filled up with ends of document that are not
    learned, in a segment of their own.
    """

    def __init__(self, window: int, *, end_of_document: int, counts: ChatCounts):
        self._window = window
        self._end = np.uint32(end_of_document) | IGNORE_BIT
        self._counts = counts
        # (room, number of the window) ascending, and the documents of each.
        self._rooms: list[tuple[int, int]] = []
        self._open: dict[int, list[np.ndarray]] = {}
        self._next = 0

    def add(self, document: TokenDocument) -> list[np.ndarray]:
        """Takes a document; returns the documents of the windows that are then complete, the last with padding."""
        done: list[np.ndarray] = []
        for part in self._parts(document):
            place = bisect.bisect_left(self._rooms, (len(part), 0))
            if place < len(self._rooms):
                room, number = self._rooms.pop(place)
            else:
                room, number = self._window, self._next
                self._next += 1
            self._open.setdefault(number, []).append(part)
            bisect.insort(self._rooms, (room - len(part), number))
            if self._rooms[0][0] == 0 or len(self._rooms) > OPEN_WINDOWS:
                done += self._close()
        return done

    def finish(self) -> list[np.ndarray]:
        """The documents of all windows that are still open."""
        done: list[np.ndarray] = []
        while self._rooms:
            done += self._close()
        return done

    def _close(self) -> list[np.ndarray]:
        """The fullest window."""
        room, number = self._rooms.pop(0)
        documents = self._open.pop(number)
        if room:
            padding = np.full(room, self._end, np.uint32)
            padding[0] |= DOCUMENT_START_BIT
            # Not a document of its own, which would be counted.
            documents[-1] = np.concatenate([documents[-1], padding])
            self._counts.padding += room
        return documents

    def _parts(self, document: TokenDocument) -> list[np.ndarray]:
        tokens, window = document.tokens, self._window
        if len(tokens) <= window:
            return [tokens]
        if document.turn_ends is None:
            parts = [tokens[start : start + window].copy() for start in range(0, len(tokens), window)]
            for part in parts:
                part[0] |= DOCUMENT_START_BIT | IGNORE_BIT
            return parts
        # Room for the end of document, unless the turn ends with it.
        end = self._end & ~IGNORE_BIT
        fits = [stop for stop in document.turn_ends if stop + int(tokens[stop - 1] != end) <= window]
        if not fits:
            self._counts.left_out += 1
            return []
        self._counts.shortened += 1
        stop = fits[-1]
        return [tokens[:stop] if tokens[stop - 1] == end else np.append(tokens[:stop], self._end)]
