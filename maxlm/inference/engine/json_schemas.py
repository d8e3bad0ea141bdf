"""Limits on the size of JSON schemas that a response must follow. The schemas of clients are untrusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maxlm.errors import InputError
from maxlm.storage.json_text import MAX_DEPTH

MAX_SCHEMA_CHARACTERS = 2**18
# Number of characters of a string, such as `const` and `pattern`, and of elements of a list or object.
MAX_STRING_CHARACTERS = 2**13
MAX_ELEMENTS = 2**12
# Formats of strings that llguidance enforces.
_FORMATS = frozenset(['date', 'date-time', 'duration', 'email', 'hostname', 'ipv4', 'ipv6', 'time', 'uri', 'uuid'])
# Keywords whose values are data, and those whose values are schemas by name.
_DATA = frozenset(['const', 'default', 'enum', 'example', 'examples'])
_BY_NAME = frozenset(['$defs', 'definitions', 'dependentSchemas', 'patternProperties', 'properties'])


def schema_text(schema: Any, name: str) -> str:
    """Returns the JSON text of a schema, `without_unknown_formats`.

    Args:
        schema: JSON schema.
        name: name of the parameter, for errors.

    Raises:
        InputError: the schema is no JSON, or exceeds a limit.
    """
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f'{name}: the schema must be valid JSON: {" ".join(str(error).split())[:200]}') from None
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InputError(
            f'{name}: the schema has {len(text)} characters; the limit is {MAX_SCHEMA_CHARACTERS}; use fewer names and '
            'shorter texts'
        )
    # (key of the value, value) of one level.
    level: list[tuple[str, Any]] = [('schema', schema)]
    for _ in range(MAX_DEPTH + 1):
        level = [pair for key, value in level for pair in _children(key, value, name)]
        if not level:
            return json.dumps(without_unknown_formats(schema))
    raise InputError(f'{name}: the schema is nested deeper than {MAX_DEPTH} levels; use fewer levels')


def without_unknown_formats(schema: Any) -> Any:
    """Returns a schema without formats that llguidance does not know, which are errors there.

    Formats are annotations by default (JSON Schema 2020-12, "Validation", 7.2.1), and generators of schemas write their
    own, such as `password` and `nanoid`.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(child) for child in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            found[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: without_unknown_formats(child) for name, child in value.items()}
        elif key != 'format' or not isinstance(value, str) or value in _FORMATS:
            found[key] = without_unknown_formats(value)
    return found


def _children(key: str, value: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the values in a value. Raises InputError if the value is too large."""
    if not isinstance(value, (str, list, tuple, dict)):
        return []
    limit, unit = (MAX_STRING_CHARACTERS, 'characters') if isinstance(value, str) else (MAX_ELEMENTS, 'elements')
    longest_key = max(map(len, map(str, value)), default=0) if isinstance(value, dict) else 0
    if len(value) > limit or longest_key > MAX_STRING_CHARACTERS:
        size, limit, unit = (
            (len(value), limit, unit)
            if len(value) > limit
            else (longest_key, MAX_STRING_CHARACTERS, 'characters in a name')
        )
        raise InputError(f'{name}: {key[:50]!r} in the schema has {size} {unit}; the limit is {limit}; shorten it')
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    return [] if isinstance(value, str) else [(key, child) for child in value]
