"""Filter decisions on the documents of a partition, and a filter that applies them."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.filters_by_name import make_cleaner
from maxlm.data.filters.report import EXACT_DUPLICATE, NEAR_DUPLICATE, CleaningReport
from maxlm.data.prepare.task_results import load_result, pack, save_result, unpack
from maxlm.errors import InputError


class FilterDecision(enum.IntEnum):
    """Decision on one document.

    Attributes:
        KEPT: the document is unchanged.
        SHORTENED: a filter removed a part of the text. The filters run again when the document is written.
        FILTERED: a filter removed the document.
        EXACT_DUPLICATE: the document is removed as an exact duplicate.
        NEAR_DUPLICATE: the document is removed as a near-duplicate.
    """

    KEPT = 0
    SHORTENED = 1
    FILTERED = 2
    EXACT_DUPLICATE = 3
    NEAR_DUPLICATE = 4


DUPLICATE_REASONS = {FilterDecision.EXACT_DUPLICATE: EXACT_DUPLICATE, FilterDecision.NEAR_DUPLICATE: NEAR_DUPLICATE}


@dataclasses.dataclass(frozen=True)
class FilterDecisions:
    """Decisions on the documents of a partition, in the order of reading.

    Attributes:
        codes: uint8 [number of documents], values of FilterDecision.
        checksum: `DocumentHash` of the documents.
        shortened: bool [number of documents]; True if a filter removed a part of the text, also for duplicates.
        kept_names: maps the index of a duplicate to the name of the document that is kept instead. Contains only the
            first duplicates of each kind, which the report shows.
    """

    codes: np.ndarray
    checksum: str
    shortened: np.ndarray
    kept_names: dict[int, str]

    def save(self, path: Path, identity: str) -> None:
        """Writes the decisions to a file. Raises InputError if it cannot be written."""
        result = {
            'codes': pack(self.codes),
            'checksum': self.checksum,
            'shortened': pack(self.shortened),
            'kept_names': list(self.kept_names.items()),
        }
        save_result(path, identity, result)

    @classmethod
    def load(cls, path: Path, identity: str) -> FilterDecisions | None:
        """Returns the saved decisions; None if the file is missing, damaged or has a different identity."""
        result = load_result(path, identity)
        if result is None:
            return None
        try:
            kept_names = {int(place): str(name) for place, name in result['kept_names']}
            return cls(unpack(result['codes']), result['checksum'], unpack(result['shortened']), kept_names)
        except (KeyError, TypeError, ValueError):
            return None


class DocumentHash:
    """Hash of the names and lengths of consecutive documents. Detects files that change between two readings."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Adds the next document."""
        size = len(document.text) if document.tokens is None else len(document.tokens)
        self._hash.update(f'{document.name}\0{size}\0'.encode(errors='surrogateescape'))

    def value(self) -> str:
        """Returns the checksum of the documents added so far."""
        return self._hash.hexdigest()


class DocumentFilter:
    """Applies filter decisions to the documents of a partition, which must come in the order of reading.

    Attributes:
        duplicates: report on the removed duplicates, including the number of those that were shortened.
    """

    def __init__(self, name: str, decisions: FilterDecisions | None, filters: Sequence[str]):
        """Creates a filter.

        Args:
            name: name of the partition in messages.
            decisions: the filter decisions; None keeps all documents.
            filters: names of the filters, which run again on shortened documents.
        """
        self.duplicates = CleaningReport()
        self._name = name
        self._decisions = decisions
        self._clean = make_cleaner(filters)
        self._checksum = DocumentHash()
        self._place = 0

    def keep(self, documents: Iterable[Document]) -> list[Document]:
        """Returns the next documents that are kept, after shortening them where a filter does so.

        Raises:
            InputError: the input has changed since the scan.
        """
        if self._decisions is None:
            return list(documents)
        kept = []
        for document in documents:
            self._checksum.add(document)
            place, self._place = self._place, self._place + 1
            if place >= len(self._decisions.codes):
                raise self._changed()
            decision = FilterDecision(int(self._decisions.codes[place]))
            if decision is FilterDecision.FILTERED:
                continue
            if self._decisions.shortened[place]:
                cleaned = self._clean(document)
                if isinstance(cleaned, FilterResult):
                    raise self._changed()
                document = cleaned
            if decision in DUPLICATE_REASONS:
                detail = self._decisions.kept_names.get(place, '')
                self.duplicates.count(document, FilterResult(DUPLICATE_REASONS[decision], detail))
                self.duplicates.shortened_documents += bool(self._decisions.shortened[place])
            else:
                kept.append(document)
        return kept

    def finish(self) -> None:
        """Raises InputError unless `keep` received exactly the documents of the scan."""
        if self._decisions is not None and self._checksum.value() != self._decisions.checksum:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f'{self._name}: changed while maxlm prepare was running; run it again')
