"""Chooses the validation documents of --input. If there are few documents, the end of one document is chosen instead.

The choice depends only on names and lengths. It is the same on every machine and for any number of workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from maxlm.data.documents.document import Document
from maxlm.data.prepare import train_val_split
from maxlm.data.prepare.train_val_split import name_hash, validation_threshold

# Complete documents are chosen if the validation fraction of their number is at least this fraction of one document.
MIN_FRACTION_OF_DOCUMENT = 0.25
# If training can start during the preparation, validation documents come from one partition: at most this
# fraction of it, and about STREAM_BYTES at most.
MAX_STREAM_FRACTION = 0.5
STREAM_BYTES = 16 * 2**20
# Minimum number of characters or tokens on each side of a cut.
MIN_PART = 32


@dataclasses.dataclass(frozen=True)
class Cut:
    """A document whose end is validation data.

    Attributes:
        name: name of the document.
        start: index of the first character or token of the validation part.
    """

    name: str
    start: int

    @property
    def tail_name(self) -> str:
        """Name of the validation part."""
        return f'{self.name}#{self.start}'

    def apply(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents. Splits the document `name` in two: its beginning keeps the name."""
        for document in documents:
            if document.name != self.name:
                yield document
                continue
            tokens, start = document.tokens, self.start
            yield dataclasses.replace(
                document, text=document.text[:start], tokens=None if tokens is None else tokens[:start]
            )
            yield dataclasses.replace(
                document,
                name=self.tail_name,
                text=document.text[start:],
                tokens=None if tokens is None else tokens[start:],
            )


@dataclasses.dataclass(frozen=True)
class ValidationChoice:
    """The choice of validation documents of --input.

    Attributes:
        below: a document is validation data if the hash of its name is below this threshold.
        cut: the document whose end is validation data; None = no document is cut.
        note: reason for a cut or for an empty split; '' if there is neither.
        partition: number of the only partition with validation documents; None = all partitions.
    """

    below: int
    cut: Cut | None = None
    note: str = ''
    partition: int | None = None

    def within(self, partition: int) -> ValidationChoice:
        """Returns this choice restricted to the documents of one partition."""
        return self if self.partition in (None, partition) else ValidationChoice(0)

    def includes(self, name: str) -> bool:
        """Returns True if the document `name` is validation data. The name must come from `parts`."""
        return name_hash(name) < self.below or (self.cut is not None and name == self.cut.tail_name)

    def parts(self, documents: Iterable[Document]) -> Iterable[Document]:
        """Returns the documents after applying the cut, if there is one."""
        return documents if self.cut is None else self.cut.apply(documents)


def stream_fraction(fraction: float, size: int, total: int) -> float:
    """Returns the fraction of the documents of one partition that corresponds to `fraction` of all documents.

    Args:
        fraction: fraction of all documents.
        size: size of the partition in bytes; 0 if unknown.
        total: size of all partitions in bytes.
    """
    return max(fraction, min(MAX_STREAM_FRACTION, min(fraction * total, STREAM_BYTES) / max(size, 1)))


def choose_validation(documents: Iterable[Document], fraction: float) -> ValidationChoice:
    """Chooses about `fraction` of the documents for validation.

    If there are few documents, one complete document would be much more than `fraction`. A single document would leave
    no training data. In both cases the end of the longest document is chosen: `fraction` of all text, cut at the end of
    a line if possible.

    Stops reading when the choice is certain, at the latest after `train_val_split.MAX_NAMES` documents.

    Raises:
        InputError: there are no documents.
    """
    seen = _Seen()
    names = seen.names(documents)
    below = validation_threshold(names, fraction)
    if not fraction:
        return ValidationChoice(0)
    enough = max(2, math.ceil(min(MIN_FRACTION_OF_DOCUMENT / fraction, train_val_split.MAX_NAMES)))
    for _ in itertools.islice(names, max(0, enough - seen.documents)):
        pass
    if seen.documents >= enough:
        return ValidationChoice(below)
    assert seen.longest is not None
    longest, label = seen.longest, 'the only document' if seen.documents == 1 else 'the longest document'
    unit = 'characters' if longest.tokens is None else 'tokens'
    reason = ''
    if not longest.is_divisible:
        reason = f'{label}, {longest.name}, is a conversation, or a prompt with its answer, which is not split'
    elif (start := _place(longest, fraction * seen.length)) is None:
        reason = f'{label}, {longest.name}, has {_length(longest):,} {unit}, too few to split'
    else:
        few = f'{seen.documents} document{"s" if seen.documents > 1 else ""}'
        note = f'the end of {longest.name}, from {unit[:-1]} {start:,}, since there are few documents ({few})'
        return ValidationChoice(0, Cut(longest.name, start), note)
    # The hash of the names splits several documents, so only a single document leaves validation empty.
    return ValidationChoice(below, note=reason if seen.documents == 1 else '')


class _Seen:
    """Number and total length of the documents read so far, and the longest document."""

    def __init__(self) -> None:
        self.documents = self.length = 0
        self.longest: Document | None = None

    def names(self, documents: Iterable[Document]) -> Iterator[str]:
        for document in documents:
            self.documents += 1
            self.length += _length(document)
            if self.longest is None or _length(document) > _length(self.longest):
                self.longest = document
            yield document.name


def _length(document: Document) -> int:
    return len(document.text) if document.tokens is None else len(document.tokens)


def _place(document: Document, length: float) -> int | None:
    """Returns the index at which the last `length` characters or tokens start; None if the document is too short.

    In a text, the index is moved to a nearby start of a line or word.
    """
    text = document.text
    # Leading and trailing whitespace does not count as text.
    first, stop = 0, _length(document)
    if document.tokens is None:
        first, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    if stop - first < 2 * MIN_PART:
        return None
    tail = min(max(round(length), MIN_PART), stop - first - MIN_PART)
    start = stop - tail
    if document.tokens is not None:
        return start
    smallest, largest = max(first + MIN_PART, start - tail // 2), min(stop - MIN_PART, start + tail // 2)
    for boundary in '\n', ' ':
        places = text.rfind(boundary, smallest - 1, start) + 1, text.find(boundary, start, largest) + 1
        found = [place for place in places if smallest <= place <= largest]
        if found:
            return min(found, key=lambda place: abs(place - start))
    return start
