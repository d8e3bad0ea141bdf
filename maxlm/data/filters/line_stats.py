"""The lines of a text as the filters of the web see them, and how much of it is there before."""

from __future__ import annotations

from collections.abc import Sequence


def filled_lines(text: str) -> list[str]:
    """The lines that hold something, without the blanks around it."""
    return [line for line in map(str.strip, text.split('\n')) if line]


def fraction(num_matching: float, total: float) -> float:
    """Returns `num_matching / total`, or 0 if `total` is 0."""
    return num_matching / total if total else 0.0


def repeated_fractions(parts: Sequence[str]) -> tuple[float, float]:
    """Shares of the parts, and of their characters, that stand in a part that was there before."""
    # The first of equal parts is not repeated, so that leaving out the repeated ones loses nothing.
    unique = set(parts)
    characters = sum(map(len, parts))
    return (
        fraction(len(parts) - len(unique), len(parts)),
        fraction(characters - sum(map(len, unique)), characters),
    )
