"""Curves before they are drawn: taken out of lines, thinned, smoothed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxlm.storage.json_fields import number

# (x, y); None where the value is not finite, which breaks the curve.
Point = tuple[float, float | None]
MAX_POINTS = 1000


def curve(lines: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """The values of one key over the steps; lines without the key are no points, null is a gap."""
    points: list[Point] = []
    for line in lines:
        if key in line and (step := number(line, 'step')) is not None:
            points.append((step, number(line, key)))
    return points


def finite(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Those with a value."""
    return [(x, y) for x, y in points if y is not None]


def scale_by(points: Sequence[Point], factor: float) -> list[Point]:
    """The same in another unit."""
    return list(points) if factor == 1 else [(x, None if y is None else y * factor) for x, y in points]


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: of each stretch the lowest, the highest and a gap, and both ends of the whole.

    So a spike of a single step is still seen, and as high as it was.
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
    """The mean of the `width` points around each, fewer near the ends and beside gaps, which stay gaps.

    The very first and last points have none: it would be as noisy as they are.
    """
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    result: list[Point] = []
    edge = width // 6
    for index in range(edge, len(points) - edge):
        x, y = points[index]
        # As far to the left as to the right: at the ends a lopsided mean would bend the curve.
        reach = min(width // 2, index, len(points) - 1 - index)
        first, last = index - reach, index + reach + 1
        mean = (sums[last] - sums[first]) / max(1, counts[last] - counts[first])
        result.append((x, None if y is None else mean))
    return result


def break_at_gaps(points: Sequence[Point], max_gap: float) -> list[Point]:
    """Inserts a gap between points further apart than `max_gap`, such as between two attempts of a run."""
    result: list[Point] = []
    for x, y in points:
        if result and x - result[-1][0] > max_gap:
            result.append((x, None))
        result.append((x, y))
    return result
