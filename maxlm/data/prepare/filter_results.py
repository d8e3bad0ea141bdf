"""What the cleaning says of each document of a group, and taking out of the group what it says."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.registry import make_cleaner
from maxlm.data.filters.report import EXACT_DUPLICATE, NEAR_DUPLICATE, CleaningReport
from maxlm.data.prepare.task_results import load_result, pack, save_result, unpack
from maxlm.errors import InputError


class FilterDecision(enum.IntEnum):
    """What is done with a document."""

    KEPT = 0
    # Kept after a filter took a part of its text; the filters are run on it again.
    SHORTENED = 1
    FILTERED = 2
    EXACT_DUPLICATE = 3
    NEAR_DUPLICATE = 4


DUPLICATE_REASONS = {FilterDecision.EXACT_DUPLICATE: EXACT_DUPLICATE, FilterDecision.NEAR_DUPLICATE: NEAR_DUPLICATE}


@dataclasses.dataclass(frozen=True)
class FilterDecisions:
    """The verdicts on the documents of a group, in the order of reading.

    Attributes:
        codes: uint8 [number of documents], each a Verdict.
        checksum: `checksum_of` the documents that were judged.
        shortened: bool [number of documents]: a filter takes a part of the text, whatever becomes of the rest.
        kept_names: for the first duplicates of either kind, by place: the name of the document that is kept instead.
    """

    codes: np.ndarray
    checksum: str
    shortened: np.ndarray
    kept_names: dict[int, str]

    def save(self, path: Path, identity: str) -> None:
        """Writes them; raises InputError when that fails."""
        facts = {
            'codes': pack(self.codes),
            'checksum': self.checksum,
            'shortened': pack(self.shortened),
            'kept_names': list(self.kept_names.items()),
        }
        save_result(path, identity, facts)

    @classmethod
    def load(cls, path: Path, identity: str) -> FilterDecisions | None:
        """What `save` wrote with the same identity, None where there is none such."""
        facts = load_result(path, identity)
        if facts is None:
            return None
        try:
            kept_names = {int(place): str(name) for place, name in facts['kept_names']}
            return cls(unpack(facts['codes']), facts['checksum'], unpack(facts['shortened']), kept_names)
        except (KeyError, TypeError, ValueError):
            return None


class DocumentHash:
    """Of documents in a row, by name and length: tells a file that was changed between two readings."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Counts in the next document."""
        size = len(document.text) if document.tokens is None else len(document.tokens)
        self._hash.update(f'{document.name}\0{size}\0'.encode(errors='surrogateescape'))

    def value(self) -> str:
        """The checksum of those so far."""
        return self._hash.hexdigest()


class DocumentFilter:
    """Lets through what is kept of a group's documents, which must come in the order of reading.

    Attributes:
        duplicates: of the documents that the filters kept: what equals or resembles another, and how many of these
            were shortened.
    """

    def __init__(self, name: str, verdicts: FilterDecisions | None, filters: Sequence[str]):
        """With `verdicts` None all is kept. `name` is the group's, for messages."""
        self.duplicates = CleaningReport()
        self._name = name
        self._verdicts = verdicts
        self._clean = make_cleaner(filters)
        self._checksum = DocumentHash()
        self._place = 0

    def keep(self, documents: Iterable[Document]) -> list[Document]:
        """Those of the next documents that are kept, as the filters leave them.

        Raises:
            InputError: there are more than were judged.
        """
        if self._verdicts is None:
            return list(documents)
        kept = []
        for document in documents:
            self._checksum.add(document)
            place, self._place = self._place, self._place + 1
            if place >= len(self._verdicts.codes):
                raise self._changed()
            decision = FilterDecision(int(self._verdicts.codes[place]))
            if decision is FilterDecision.FILTERED:
                continue
            if self._verdicts.shortened[place]:
                cleaned = self._clean(document)
                if isinstance(cleaned, FilterResult):
                    raise self._changed()
                document = cleaned
            if decision in DUPLICATE_REASONS:
                detail = self._verdicts.kept_names.get(place, '')
                self.duplicates.count(document, FilterResult(DUPLICATE_REASONS[decision], detail))
                self.duplicates.shortened_documents += bool(self._verdicts.shortened[place])
            else:
                kept.append(document)
        return kept

    def finish(self) -> None:
        """Raises InputError unless all that was judged, and nothing else, went through."""
        if self._verdicts is not None and self._checksum.value() != self._verdicts.checksum:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f'{self._name}: changed while maxlm.prepare was running; run it again')
