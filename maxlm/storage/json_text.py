"""Parses untrusted JSON, and writes JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

# Deep enough for every format that maxlm reads, and far below Python's recursion limit.
MAX_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: JSON, as a string or as UTF-8 bytes.

    Raises:
        ValueError: the text is not UTF-8, is not JSON, or nests arrays and objects deeper than `MAX_DEPTH`.
    """
    decoded = text if isinstance(text, str) else text.decode('utf-8')
    try:
        value = json.loads(decoded)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # A text with few brackets cannot be nested deeply, and counting is much cheaper than traversing the value.
    if decoded.count('[') + decoded.count('{') > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def finite_json(value: Any, indent: int | None = None) -> str:
    """Returns the JSON text of a value with null for NaN and infinities. JSON has no NaN; every parser accepts null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def to_json(value: Any) -> str:
    """Returns the JSON text of a value, spelled as by the filter `tojson` of chat templates.

    Raises:
        ValueError: the value contains NaN, an infinity, an unpaired surrogate, or an object that is no JSON value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError('an unpaired surrogate is not valid text; remove it') from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError('JSON has no NaN, Infinity or number beyond 1.8e308') from None
    return text


def parse_lines(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (line number from 1, value) of each line of JSON Lines that is not blank. The last needs no newline.

    Only newlines separate lines: JSON strings may contain the other separators of `str.splitlines`.

    Raises:
        ValueError: a line is not JSON. The message has its number.
    """
    for number, line in enumerate(content.split(b'\n'), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise ValueError(f'line {number} is not valid JSON: {error}') from error


def strings_in(value: Any) -> Iterator[str]:
    """Yields every string in a JSON value, except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings_in(each)


_TOO_DEEP = f'arrays or objects are nested deeper than {MAX_DEPTH} levels'


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return False
    return True
