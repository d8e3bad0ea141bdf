"""Removes the nulls that Arrow adds to records.

All structs of an Arrow column have the same fields. A field that only other rows have is null, and `Dataset.to_json`
writes that null. It is therefore equal to a missing field. Nulls in lists, and in the JSON texts of arguments, calls,
tools and parameters, were written by the author of the record and are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_null_fields(value: Any) -> Any:
    """Returns a JSON value without the fields of objects that are null.

    The exception is `"default": null` of a JSON schema that allows null.
    """
    if isinstance(value, Mapping):
        return {
            key: without_null_fields(item)
            for key, item in value.items()
            if item is not None or (key == 'default' and _allows_null(value))
        }
    return [without_null_fields(item) for item in value] if isinstance(value, list | tuple) else value


def present_fields(entry: Any) -> Any:
    """Returns a record without its fields that are null. Values of other fields, and of other types, are unchanged."""
    return {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else entry


def _allows_null(schema: Mapping[str, Any]) -> bool:
    alternatives = [one for key in ('anyOf', 'oneOf') if isinstance(schema.get(key), list) for one in schema[key]]
    types = [schema.get('type'), *(one.get('type') for one in alternatives if isinstance(one, Mapping))]
    return schema.get('nullable') is True or any(
        kind == 'null' or (isinstance(kind, list) and 'null' in kind) for kind in types
    )
