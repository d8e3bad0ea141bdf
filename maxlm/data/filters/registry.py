"""Registry of filters by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import Filter, FilterResult
from maxlm.data.filters.c4_fineweb import c4, fineweb
from maxlm.data.filters.code import code
from maxlm.data.filters.gopher_quality import gopher_quality
from maxlm.data.filters.gopher_repetition import gopher_repetition
from maxlm.errors import InputError

FILTERS: dict[str, Filter] = {
    'gopher_quality': gopher_quality,
    'gopher_repetition': gopher_repetition,
    'c4': c4,
    'fineweb': fineweb,
    'code': code,
}


def make_cleaner(names: Sequence[str]) -> Filter:
    """Returns a filter that applies the named filters in order. The first removal determines the result.

    Raises:
        InputError: a name is unknown or given twice. The returned function raises it for pretokenized documents.
    """
    for place, name in enumerate(names):
        if name not in FILTERS:
            near = difflib.get_close_matches(name, FILTERS, n=1)
            remedy = f'did you mean {near[0]!r}?' if near else f'use one of {", ".join(FILTERS)}'
            raise InputError(f'filter {name!r} does not exist; {remedy}')
        if name in names[:place]:
            raise InputError(f'filter {name!r} is given twice; give it once')

    def clean(document: Document) -> Document | FilterResult:
        if names and document.tokens is not None:
            raise InputError(
                f'{document.name} is already tokenized: {", ".join(names)} can filter only text; remove --filter'
            )
        for name in names:
            result = FILTERS[name](document)
            if isinstance(result, FilterResult):
                return result
            document = result
        return document

    return clean
