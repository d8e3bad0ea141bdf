"""Filters by name: the filters of maxlm, `decontaminate:PATH`, and `package.module:function` of the user."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from maxlm.config.user_function import describe_exception, is_function_name, load_function, module_checksum
from maxlm.data.documents.document import Document
from maxlm.data.filters.base import Filter, FilterResult
from maxlm.data.filters.c4_fineweb import c4, fineweb
from maxlm.data.filters.code import code
from maxlm.data.filters.decontaminate import PREFIX, checksum, decontaminate
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


def user_filter(name: str) -> Filter:
    """Returns the filter `package.module:function` of the user.

    The function receives the Document and returns True to keep it, or False to remove it.

    Raises:
        InputError: the function cannot be imported. The returned filter raises it if the function raises an exception
            or returns anything but True or False.
    """
    function = load_function(name, kind='filter', arguments=('document',))

    def keep(document: Document) -> Document | FilterResult:
        try:
            is_kept = function(document)
        except Exception as error:
            raise InputError(
                f'{document.name}: the filter {name} raised {describe_exception(error)}; fix the function'
            ) from error
        if not isinstance(is_kept, bool | np.bool_):
            raise InputError(
                f'{document.name}: the filter {name} must return True or False; it returned {str(is_kept)[:80]!r}'
            )
        return document if is_kept else FilterResult(f'{name}: removed', 'returned False')

    return keep


def describe_filters(names: Sequence[str]) -> list[str]:
    """Returns the names of filters, with checksums of the files that they depend on.

    The result changes if the module of a user's filter or an evaluation text is edited. The filters must be loaded.
    """

    def describe(name: str) -> str:
        if name.startswith(PREFIX):
            return f'{PREFIX} texts with checksum {checksum(name)}'
        return f'{name} with checksum {module_checksum(name)}' if is_function_name(name) else name

    return [describe(name) for name in names]


def make_cleaner(names: Sequence[str]) -> Filter:
    """Returns a filter that applies the named filters in order. The first removal determines the result.

    Raises:
        InputError: a name is unknown or given twice, or a filter of the user cannot be imported. The returned function
            raises it for pretokenized documents, and if a filter of the user fails.
    """
    filters = []
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InputError(f'filter {name!r} is given twice; give it once')
        filters.append(_find(name))

    def clean(document: Document) -> Document | FilterResult:
        if names and document.tokens is not None:
            raise InputError(
                f'{document.name} is already tokenized: {", ".join(names)} can filter only text; remove --filter'
            )
        for one in filters:
            result = one(document)
            if isinstance(result, FilterResult):
                return result
            document = result
        return document

    return clean


def _find(name: str) -> Filter:
    if name in FILTERS:
        return FILTERS[name]
    if name.startswith(PREFIX):
        return decontaminate(name)
    if is_function_name(name):
        return user_filter(name)
    near = difflib.get_close_matches(name, FILTERS, n=1)
    names = f'package.module:function, {PREFIX}PATH or one of {", ".join(FILTERS)}'
    remedy = f'did you mean {near[0]!r}?' if near else f'use {names}'
    raise InputError(f'filter {name!r} does not exist; {remedy}')
