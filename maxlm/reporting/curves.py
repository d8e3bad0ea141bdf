"""Extracts and downsamples curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxlm.storage.json_fields import number

# (x, y). y is None if the value is not finite, which breaks the curve.
Point = tuple[float, float | None]
MAX_POINTS = 2000


def curve(lines: Iterable[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[Point]:
    """Returns the values of one key over the steps, multiplied by a factor that converts their unit.

    Lines without the key are skipped; null is a gap.
    """
    points: list[Point] = []
    for line in lines:
        if key in line and (step := number(line, 'step')) is not None:
            value = number(line, key)
            points.append((step, None if value is None else value * factor))
    return points


def finite(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Returns the points with a value."""
    return [(x, y) for x, y in points if y is not None]


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Returns at most `limit` points: the lowest, the highest and a gap of each bin, and both ends of the curve.

    This preserves spikes of a single step, with their height.
    """
    if len(points) <= limit:
        return list(points)
    num_bins = max(1, (limit - 2) // (3 if any(y is None for _, y in points) else 2))
    inner = range(1, len(points) - 1)
    kept_indices = {0, len(points) - 1}
    for index_of_bin in range(num_bins):
        bin_indices = inner[len(inner) * index_of_bin // num_bins : len(inner) * (index_of_bin + 1) // num_bins]
        values = [(y, index) for index in bin_indices if (y := points[index][1]) is not None]
        if values:
            kept_indices |= {min(values)[1], max(values)[1]}
        if len(values) < len(bin_indices):
            kept_indices.add(next(index for index in bin_indices if points[index][1] is None))
    return [points[index] for index in sorted(kept_indices)]


def break_at_gaps(points: Sequence[Point], max_gap: float) -> list[Point]:
    """Inserts a gap between points further apart than `max_gap`, e.g. between two attempts of a run."""
    result: list[Point] = []
    for x, y in points:
        if result and x - result[-1][0] > max_gap:
            # The x of a gap must differ from its neighbors, because the page joins curves by x.
            result.append(((x + result[-1][0]) / 2, None))
        result.append((x, y))
    return result


def outlier_limit(values: Sequence[float], fraction: float = 0.02) -> float | None:
    """Returns the upper end of a plot without values far above all but `fraction` of them; None without outliers.

    A run's first losses and its spikes would otherwise compress the rest of the curve.
    """
    if len(values) < 50:
        return None
    ordered = sorted(values)
    low, quantile, high = ordered[0], ordered[int((1 - fraction) * (len(ordered) - 1))], ordered[-1]
    return None if high <= 2 * quantile - low else quantile + 0.25 * (quantile - low)
