"""Reads typed values from JSON lines that a killed, older or foreign writer may have left incomplete."""

from __future__ import annotations

import math
from typing import Any


def number(line: Any, key: str) -> float | None:
    """Returns a finite number, or None if the value is missing or is not a finite number."""
    value = line.get(key) if isinstance(line, dict) else None
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is not int:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def text(line: Any, key: str) -> str:
    """Returns the value as text, or '' if it is missing."""
    value = line.get(key) if isinstance(line, dict) else None
    return '' if value is None else str(value)


def mapping(line: Any, key: str) -> dict[str, Any]:
    """Returns a JSON object, or {} if the value is missing or is not an object."""
    value = line.get(key) if isinstance(line, dict) else None
    return value if isinstance(value, dict) else {}


def items(line: Any, key: str) -> list[Any]:
    """Returns a list, or [] if the value is missing or is not a list."""
    value = line.get(key) if isinstance(line, dict) else None
    return list(value) if isinstance(value, list | tuple) else []
