"""Previews the training documents: their names for the validation split and a sample of text for the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from maxlm.data.documents.document import Document
from maxlm.data.executors.executor import TransientError
from maxlm.data.prepare import train_val_split
from maxlm.data.prepare.choose_validation import ValidationChoice
from maxlm.data.prepare.filter_results import DocumentFilter
from maxlm.data.prepare.partitions import Partition, ReadSettings, read_batches
from maxlm.data.prepare.scan import DecisionFile
from maxlm.data.prepare.train_val_split import sample_places
from maxlm.errors import InputError


@dataclasses.dataclass(frozen=True)
class Preview:
    """The training documents in order, before they are written.

    Attributes:
        partitions: the partitions of --input.
        decisions: the filter decisions of each partition; None keeps all of its documents.
        reading: settings of the readers.
        filters: names of the filters that shorten documents.
        skip_failed: if True, a storage failure skips the rest of the partition; otherwise it is an error.
    """

    partitions: Sequence[Partition]
    decisions: Sequence[DecisionFile | None]
    reading: ReadSettings
    filters: tuple[str, ...]
    skip_failed: bool

    def documents(self) -> Iterator[Document]:
        """Yields all documents."""
        for place in range(len(self.partitions)):
            yield from self._documents(place)

    def first(self) -> Preview:
        """Returns the preview of the first partition that contains documents, or of no partition."""
        for place, (partition, decisions) in enumerate(zip(self.partitions, self.decisions, strict=True)):
            if next(self._documents(place), None):
                return dataclasses.replace(self, partitions=[partition], decisions=[decisions])
        return dataclasses.replace(self, partitions=[], decisions=[])

    def texts(self, validation: ValidationChoice, on_text: Callable[[int], None]) -> Iterator[str]:
        """Yields at most SAMPLE_BYTES characters of text to train the tokenizer.

        If the sampled partitions contain no training text, yields the beginning of the first training document.

        Args:
            validation: the validation documents, which are excluded.
            on_text: called with the number of characters of each sampled text.
        """
        places = sample_places([partition.size for partition in self.partitions])
        found = False
        for place in places:
            left = train_val_split.SAMPLE_BYTES // len(places)
            for text in self._trained_on(place, validation):
                on_text(len(text[:left]))
                yield text[:left]
                found = True
                left -= len(text)
                if left <= 0:
                    break
        if found:
            return
        for place in range(len(self.partitions)):
            for text in self._trained_on(place, validation):
                yield text[: train_val_split.SAMPLE_BYTES]
                return

    def _trained_on(self, place: int, validation: ValidationChoice) -> Iterator[str]:
        validation = validation.within(self.partitions[place].number)
        for document in validation.parts(self._documents(place)):
            if not validation.includes(document.name):
                yield document.text

    def _documents(self, place: int) -> Iterator[Document]:
        partition, decisions = self.partitions[place], self.decisions[place]
        document_filter = DocumentFilter(partition.name, decisions.load() if decisions else None, self.filters)
        try:
            # WriteShards reports the skipped records.
            for documents, _ in read_batches(partition, self.reading, skipped=[]):
                yield from document_filter.keep(documents)
        except TransientError as error:
            # Skipping the rest makes the sample depend on the time of the failure, so it requires --skip-failed.
            if not self.skip_failed:
                raise InputError(f'{error}; finished partitions are kept: run the same command again') from error
