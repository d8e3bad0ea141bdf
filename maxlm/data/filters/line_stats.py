"""Line statistics for web filters."""

from __future__ import annotations

from collections.abc import Sequence


def filled_lines(text: str) -> list[str]:
    """Returns the non-empty lines, stripped of whitespace."""
    return [line for line in map(str.strip, text.split('\n')) if line]


def fraction(num_matching: float, total: float) -> float:
    """Returns `num_matching / total`, or 0 if `total` is 0."""
    return num_matching / total if total else 0.0


def repeated_fractions(parts: Sequence[str]) -> tuple[float, float]:
    """Returns the fractions of repeated parts and of their characters."""
    # The first occurrence does not count as repeated.
    unique = set(parts)
    characters = sum(map(len, parts))
    return (
        fraction(len(parts) - len(unique), len(parts)),
        fraction(characters - sum(map(len, unique)), characters),
    )
