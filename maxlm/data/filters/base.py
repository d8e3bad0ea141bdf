"""Interface of document filters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from maxlm.data.documents.document import Document


@dataclasses.dataclass(frozen=True)
class FilterResult:
    """Reason for removing a document.

    Attributes:
        reason: name of the rule, `FILTER: RULE`. Documents are counted by reason.
        detail: detail of this document, such as the value and its bound.
    """

    reason: str
    detail: str


# Returns the document, possibly shortened, or the reason for removing it. A filter is a pure function.
Filter = Callable[[Document], Document | FilterResult]


def drop_if(condition: bool, reason: str, value: float, bound: float) -> FilterResult | None:
    """Returns a FilterResult with `value` and the violated `bound` if `condition` is True, otherwise None.

    `drop_if(…) or drop_if(…) or document` is a list of rules. The first rule that applies determines the reason.
    """
    return FilterResult(reason, f'{_format_number(value)}; bound {_format_number(bound)}') if condition else None


def _format_number(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:.3f}'.rstrip('0').rstrip('.')
