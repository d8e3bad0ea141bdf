"""Axis scales: ranges, ticks and labels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maxlm.formatting import format_si

# Seconds between two ticks of a time axis.
_TIMES = (*(1, 2, 5, 10, 15, 30), *(60, 120, 300, 600, 900, 1800), *(3600, 7200, 10800, 21600, 43200), 86400)


class Scale(NamedTuple):
    """Range of values from `low` to `high`, linear or logarithmic. On a logarithmic scale both are above 0."""

    low: float
    high: float
    log: bool = False

    def transform(self, value: float) -> float:
        """Returns the value, or its decimal logarithm on a logarithmic scale."""
        return math.log10(value) if self.log else value

    @property
    def transformed_range(self) -> tuple[float, float]:
        return self.transform(self.low), self.transform(self.high)

    def fraction(self, value: float) -> float:
        """Returns the position of a value: 0 = low, 1 = high."""
        low, high = self.transformed_range
        return (self.transform(value) - low) / (high - low)


def covering(values: Iterable[float], *, log: bool = False, from_zero: bool = False, margin: float = 0.04) -> Scale:
    """Returns a scale that contains all values with a margin; its length is never 0.

    Args:
        values: finite values.
        log: logarithmic if there are values above 0; all other values are ignored.
        from_zero: include 0, without a margin below it.
        margin: fraction of the range to add on each side.
    """
    shown = [value for value in values if not log or value > 0]
    if not shown:
        return Scale(0.0, 1.0)
    low, high = min(shown), max(shown)
    if log:
        if high < low * 1.5:
            low, high = low / 1.5, high * 1.5
        edge = (high / low) ** margin
        return Scale(low / edge, high * edge, log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        around = abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero and low >= 0 else low - around), high + around
    edge = (high - low) * margin
    return Scale(low if low == 0 and from_zero else low - edge, high + edge)


def without_outliers(values: Sequence[float], *, share: float = 0.02) -> list[float]:
    """Removes values far above all but a fraction `share` of the values. Returns all values if there are none.

    A run's first losses and its spikes would otherwise compress the rest of the curve.
    """
    if len(values) < 50:
        return list(values)
    ordered = sorted(values)
    low, quantile, high = ordered[0], ordered[int((1 - share) * (len(ordered) - 1))], ordered[-1]
    limit = quantile + (quantile - low)
    return list(values) if high <= limit else [value for value in values if value <= quantile + 0.25 * (quantile - low)]


def ticks(scale: Scale, target: int = 5) -> list[float]:
    """Returns about `target` round values within a scale."""
    if scale.log:
        return _logarithmic_ticks(scale, target)
    step = _round_step((scale.high - scale.low) / target)
    return _multiples(scale, step)


def time_ticks(scale: Scale, target: int = 5) -> list[float]:
    """Returns about `target` round times within a scale of seconds."""
    interval = (scale.high - scale.low) / target
    step = next((time for time in _TIMES if time >= interval), None)
    return _multiples(scale, step or 86400 * _round_step(interval / 86400))


def labels(values: Sequence[float]) -> list[str]:
    """Formats ticks with enough digits to distinguish them."""
    highest = max((abs(value) for value in values), default=0.0)
    steps = [b - a for a, b in itertools.pairwise(values)]
    step = min(steps, default=highest) or 1.0
    if highest >= 1e4:
        texts = [format_si(value) for value in values]
        return texts if len(set(texts)) == len(values) else [f'{value:,.0f}' for value in values]
    if 0 < highest < 1e-2 or (steps and max(steps) > 9 * step and min(values) < 1e-2):
        return ['0' if not value else f'{value:.1e}'.replace('.0e', 'e').replace('e-0', 'e-') for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if steps and max(steps) > 1.01 * step:
        # A logarithmic axis: each value has its own precision.
        return [f'{value:g}' for value in values]
    return [f'{value:,.{digits}f}' for value in values]


def time_labels(values: Sequence[float]) -> list[str]:
    """Formats ticks in seconds: 30 s, 1 min 30 s, 5 min, 1 h 30 min, 2 d."""
    steps = [b - a for a, b in itertools.pairwise(values)]
    step = min(steps, default=max(values, default=0.0))
    texts = []
    for value in values:
        seconds = round(value)
        if seconds == 0:
            texts.append('0')
        elif step >= 86400:
            texts.append(f'{seconds / 86400:g} d')
        elif step >= 3600:
            texts.append(f'{seconds / 3600:g} h')
        elif step >= 60 and max(values) >= 3600:
            texts.append(f'{seconds // 3600} h {seconds % 3600 // 60:02} min')
        elif step >= 60:
            texts.append(f'{seconds / 60:g} min')
        elif max(values) >= 60:
            texts.append(f'{seconds // 60} min {seconds % 60:02} s')
        else:
            texts.append(f'{seconds} s')
    return texts


def _round_step(wanted: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, … that is at least `wanted`."""
    if wanted <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= wanted * (1 - 1e-9))


def _multiples(scale: Scale, step: float) -> list[float]:
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    # Multiply instead of adding, so that errors do not accumulate; rounding removes the remaining error.
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def _logarithmic_ticks(scale: Scale, target: int) -> list[float]:
    low, high = scale.transformed_range
    if high - low < 0.8:
        return ticks(Scale(scale.low, scale.high), target)
    decades = range(math.floor(low), math.ceil(high) + 1)
    factors: tuple[int, ...] = (1, 2, 5) if high - low < 2 else (1,)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    shown = [value for value in values if scale.low <= value <= scale.high]
    return shown[:: max(1, math.ceil(len(shown) / (target + 2)))]
