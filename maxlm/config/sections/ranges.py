"""Ranges of numeric config keys, and the types of keys that share a range."""

from __future__ import annotations

from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """Range of finite values that a key accepts.

    Attributes:
        low, high: smallest and largest value.
        above, below: exclude `low` or `high` itself.
        or_zero: 0 is also allowed.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    or_zero: bool = False

    def __contains__(self, value: object) -> bool:
        """Returns True if a number is in the range. NaN and infinities are not."""
        assert isinstance(value, (int, float)), value
        if self.or_zero and value == 0:
            return True
        # Comparisons with NaN are false.
        from_low = value > self.low if self.above else value >= self.low
        return from_low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f'{"greater than" if self.above else "at least"} {show_number(self.low)}'
        zero = ', or 0' if self.or_zero else ''
        return f'{low} and {"below" if self.below else "at most"} {show_number(self.high)}{zero}'


# Step numbers, token ids and positions are 32-bit integers on the devices.
INT32 = 2**31 - 1
Steps = Annotated[int, Range(0, INT32)]
StepsFrom1 = Annotated[int, Range(1, INT32)]
# Random generators take 32-bit seeds.
Seed = Annotated[int, Range(0, 2**32 - 1)]
Weight = Annotated[float, Range(0, 1000)]
Fraction = Annotated[float, Range(0, 1)]
FractionBelow1 = Annotated[float, Range(0, 1, below=True)]
FractionAbove0 = Annotated[float, Range(0, 1, above=True)]
# Added to a square root or a variance; smaller values are 0 in float32.
Epsilon = Annotated[float, Range(1e-30, 1)]
# The largest value is about three years, the longest time that threads can wait.
Seconds = Annotated[float, Range(0, 1e8)]


def show_number(value: float) -> str:
    """Returns the short text of a number for messages."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 10**5:
        return f'{value:g}'
    # Python raises ValueError when it formats integers of several thousand digits.
    if isinstance(value, int) and abs(value) >= 10**20:
        return f'{"-" if value < 0 else ""}10^{int(value.bit_length() * 0.30103)}'
    return str(value)
