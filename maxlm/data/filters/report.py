"""The report of a cleaning: how much was removed, why, and what it looked like."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.storage.json_text import parse_json

# Per reason, the first in the order of the corpus: they do not depend on who worked on what.
MAX_EXAMPLES = 3
MAX_EXCERPT = 200
# Reasons beside those of the filters. The detail is the name of the document that is kept.
EXACT_DUPLICATE = 'duplicate: exact'
NEAR_DUPLICATE = 'duplicate: near'


@dataclasses.dataclass(frozen=True)
class Example:
    """A removed document: its name, its beginning, and the detail of its removal."""

    name: str
    excerpt: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Removed:
    """What was removed for one reason. `bytes` are of UTF-8, for documents of tokens those of the tokens."""

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
    """Counts over documents in their order. Reports of parts of a corpus are merged in the order of the parts.

    Attributes:
        documents, bytes: what was looked at.
        kept_documents, kept_bytes: what is left of it.
        shortened_documents: how many of the kept ones lost a part of their text.
        removed: by reason.
    """

    documents: int = 0
    bytes: int = 0
    kept_documents: int = 0
    kept_bytes: int = 0
    shortened_documents: int = 0
    removed: dict[str, Removed] = dataclasses.field(default_factory=dict)

    def count(self, document: Document, decision: Document | FilterResult) -> None:
        """Counts the next document as it was before the cleaning, and what came of it."""
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
        """The report of both parts; `later` comes behind in the order of the corpus."""
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
        """The content of `cleaning.json`, the reasons in the order of their names."""
        facts = dataclasses.asdict(self)
        facts['removed'] = dict(sorted(facts['removed'].items()))
        return json.dumps(facts, indent=1) + '\n'

    @classmethod
    def from_json(cls, content: str) -> CleaningReport:
        """What `to_json` wrote; KeyError, TypeError or ValueError for anything else."""
        facts: dict[str, Any] = parse_json(content)
        removed = {
            reason: Removed(
                entry['documents'], entry['bytes'], tuple(Example(**example) for example in entry['examples'])
            )
            for reason, entry in facts['removed'].items()
        }
        return cls(**{**facts, 'removed': removed})

    def to_lines(self) -> list[str]:
        """For the console: a line for the whole, and one per reason, the most frequent first."""
        lines = [
            f'cleaning: {self.kept_documents:,} of {self.documents:,} documents kept, '
            f'{self.kept_bytes:,} of {self.bytes:,} bytes'
        ]
        if self.shortened_documents:
            lines[0] += f'; {self.shortened_documents:,} of the kept are shortened'
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
    # No more is looked at than may be shown, but blanks at the front do not count.
    return _shorten(document.text.lstrip()[: 4 * MAX_EXCERPT])


def _shorten(text: str) -> str:
    """One line of MAX_EXCERPT characters at most."""
    line = ' '.join(text.split())
    return line if len(line) <= MAX_EXCERPT else line[: MAX_EXCERPT - 1] + '…'
