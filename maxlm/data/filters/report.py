"""Report of filters and deduplication: numbers, reasons and examples of removed documents."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.storage.json_text import parse_json

# The examples of a reason are its first documents in corpus order, so they do not depend on the workers.
MAX_EXAMPLES = 3
MAX_EXCERPT = 200
# Reasons for duplicates. The detail is the name of the kept document.
EXACT_DUPLICATE = 'duplicate: exact'
NEAR_DUPLICATE = 'duplicate: near'


@dataclasses.dataclass(frozen=True)
class Example:
    """A removed document.

    Attributes:
        name: name of the document.
        excerpt: beginning of the document.
        detail: detail of the removal.
    """

    name: str
    excerpt: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Removed:
    """Documents removed for one reason.

    Attributes:
        documents: number of documents.
        bytes: size of the text in UTF-8, or size of the token array of pretokenized documents.
        examples: the first documents, at most MAX_EXAMPLES.
    """

    documents: int = 0
    bytes: int = 0
    examples: tuple[Example, ...] = ()

    def __add__(self, later: Removed) -> Removed:
        return Removed(
            self.documents + later.documents,
            self.bytes + later.bytes,
            (self.examples + later.examples)[:MAX_EXAMPLES],
        )


@dataclasses.dataclass
class CleaningReport:
    """Counts of the documents of a corpus or of a part of it. Reports of parts are merged in corpus order.

    Attributes:
        documents, bytes: all documents.
        kept_documents, kept_bytes: kept documents.
        shortened_documents: number of kept documents that a filter shortened.
        removed: removed documents by reason.
    """

    documents: int = 0
    bytes: int = 0
    kept_documents: int = 0
    kept_bytes: int = 0
    shortened_documents: int = 0
    removed: dict[str, Removed] = dataclasses.field(default_factory=dict)

    def count(self, document: Document, decision: Document | FilterResult) -> None:
        """Counts the next document. `document` is the original, `decision` the result of the filters."""
        size = _num_bytes(document)
        self.documents += 1
        self.bytes += size
        if isinstance(decision, FilterResult):
            example = Example(document.name, _excerpt(document), _shorten(decision.detail))
            before = self.removed.get(decision.reason, Removed())
            self.removed[decision.reason] = before + Removed(1, size, (example,))
        else:
            self.kept_documents += 1
            self.kept_bytes += _num_bytes(decision)
            self.shortened_documents += decision.text != document.text

    def merge(self, later: CleaningReport) -> CleaningReport:
        """Returns the report of both parts. `later` follows in corpus order."""
        return CleaningReport(
            self.documents + later.documents,
            self.bytes + later.bytes,
            self.kept_documents + later.kept_documents,
            self.kept_bytes + later.kept_bytes,
            self.shortened_documents + later.shortened_documents,
            {
                reason: self.removed.get(reason, Removed()) + later.removed.get(reason, Removed())
                for reason in sorted({*self.removed, *later.removed})
            },
        )

    def to_json(self) -> str:
        """Returns the content of `cleaning.json`, sorted by reason."""
        fields = dataclasses.asdict(self)
        fields['removed'] = dict(sorted(fields['removed'].items()))
        return json.dumps(fields, indent=1) + '\n'

    @classmethod
    def from_json(cls, content: str) -> CleaningReport:
        """Returns the report that `to_json` wrote. Raises KeyError, TypeError or ValueError for other content."""
        fields: dict[str, Any] = parse_json(content)
        removed = {
            reason: Removed(
                entry['documents'], entry['bytes'], tuple(Example(**example) for example in entry['examples'])
            )
            for reason, entry in fields['removed'].items()
        }
        return cls(**{**fields, 'removed': removed})

    def to_lines(self) -> list[str]:
        """Returns lines for the terminal: a total, then one line per reason, the most frequent first."""
        lines = [
            f'cleaning: {self.kept_documents:,} of {self.documents:,} documents kept, '
            f'{self.kept_bytes:,} of {self.bytes:,} bytes'
        ]
        if self.shortened_documents:
            lines[0] += f'; {self.shortened_documents:,} of the kept documents are shortened'
        ordered = sorted(self.removed.items(), key=lambda item: (-item[1].documents, item[0]))
        width = max((len(reason) for reason in self.removed), default=0)
        for reason, removed in ordered:
            first = removed.examples[0]
            lines.append(
                f'  {reason:{width}} {removed.documents:>9,} {removed.documents / self.documents:>6.1%}  '
                f'{first.name} ({first.detail})'
            )
        return lines


def _num_bytes(document: Document) -> int:
    return len(document.text.encode(errors='surrogatepass')) if document.tokens is None else document.tokens.nbytes


def _excerpt(document: Document) -> str:
    if document.tokens is not None:
        return _shorten(
            f'{len(document.tokens):,} tokens: {" ".join(map(str, document.tokens[:MAX_EXCERPT].tolist()))}'
        )
    # A prefix is sufficient for the excerpt. Leading whitespace does not count.
    return _shorten(document.text.lstrip()[: 4 * MAX_EXCERPT])


def _shorten(text: str) -> str:
    """Returns one line of at most MAX_EXCERPT characters."""
    line = ' '.join(text.split())
    return line if len(line) <= MAX_EXCERPT else line[: MAX_EXCERPT - 1] + '…'
