"""Values out of lines that a killed, older or foreign writer may have left: of the wanted kind, or absent."""

from __future__ import annotations

import math
from typing import Any


def number(line: Any, key: str) -> float | None:
    """A finite number; None where there is none."""
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
    """A text; of another value what Python writes for it, '' where there is none."""
    value = line.get(key) if isinstance(line, dict) else None
    return '' if value is None else str(value)


def mapping(line: Any, key: str) -> dict[str, Any]:
    """An object; an empty one where there is none."""
    value = line.get(key) if isinstance(line, dict) else None
    return value if isinstance(value, dict) else {}


def items(line: Any, key: str) -> list[Any]:
    """A list; an empty one where there is none."""
    value = line.get(key) if isinstance(line, dict) else None
    return list(value) if isinstance(value, list | tuple) else []
