"""What a filter says of a document: the document, perhaps shortened, or why it is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from maxlm.data.documents.document import Document


@dataclasses.dataclass(frozen=True)
class FilterResult:
    """Why a document is left out.

    Attributes:
        reason: one of few, `FILTER: RULE`; documents are counted by it.
        detail: what was met in this document, e.g. the figure and its bound.
    """

    reason: str
    detail: str


# A pure function of the document.
Filter = Callable[[Document], Document | FilterResult]


def drop_if(condition: bool, reason: str, value: float, bound: float) -> FilterResult | None:
    """A Removal that tells `value` and the `bound` that it breaks, None where `condition` does not hold.

    `drop_if(…) or remove_if(…) or document` reads as a list of rules of which the first that holds counts.
    """
    return FilterResult(reason, f'{_format_number(value)}; bound {_format_number(bound)}') if condition else None


def _format_number(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:.3f}'.rstrip('0').rstrip('.')
