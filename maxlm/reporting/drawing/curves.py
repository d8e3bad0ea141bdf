"""Extracts, downsamples and smooths curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxlm.storage.json_fields import number

# (x, y). y is None if the value is not finite, which breaks the curve.
Point = tuple[float, float | None]
MAX_POINTS = 1000


def curve(lines: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """Returns the values of one key over the steps. Lines without the key are skipped; null is a gap."""
    points: list[Point] = []
    for line in lines:
        if key in line and (step := number(line, 'step')) is not None:
            points.append((step, number(line, key)))
    return points


def finite(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Returns the points with a value."""
    return [(x, y) for x, y in points if y is not None]


def scale_by(points: Sequence[Point], factor: float) -> list[Point]:
    """Converts the values to another unit."""
    return list(points) if factor == 1 else [(x, None if y is None else y * factor) for x, y in points]


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


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """Returns the mean of the `width` points around each point, with fewer near the ends and gaps; gaps stay gaps.

    The first and last points are omitted, because their means would be as noisy as the points.
    """
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    result: list[Point] = []
    edge = width // 6
    for index in range(edge, len(points) - edge):
        x, y = points[index]
        # Use a symmetric range, because an asymmetric mean at the ends would bend the curve.
        reach = min(width // 2, index, len(points) - 1 - index)
        first, last = index - reach, index + reach + 1
        mean = (sums[last] - sums[first]) / max(1, counts[last] - counts[first])
        result.append((x, None if y is None else mean))
    return result


def break_at_gaps(points: Sequence[Point], max_gap: float) -> list[Point]:
    """Inserts a gap between points further apart than `max_gap`, e.g. between two attempts of a run."""
    result: list[Point] = []
    for x, y in points:
        if result and x - result[-1][0] > max_gap:
            result.append((x, None))
        result.append((x, y))
    return result
