"""Downsamples curves of runs of any length incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maxlm.reporting.curves import Point, curve

# Maximum number of buckets of a curve. The lowest and the highest value of each bucket are kept.
MAX_BUCKETS = 2000


class DownsampledCurve:
    """A downsampled curve: the lowest and highest point of each bucket of steps, its gaps, and the last point.

    The bucket length doubles when there are too many buckets, so old points are as dense as new ones.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS):
        self._max_buckets = max_buckets
        self._bucket_length = 1.0
        # Index of the bucket → lowest point, highest point, and a point without a value.
        self._buckets: dict[int, list[Point | None]] = {}
        self._last_point: list[Point] = []

    def add(self, points: Sequence[Point]) -> None:
        """Appends points."""
        for start in range(0, len(points), self._max_buckets):
            for point in points[start : start + self._max_buckets]:
                self._insert(point)
            while len(self._buckets) > self._max_buckets:
                previous, self._buckets = self._buckets, {}
                self._bucket_length *= 2
                for point in (kept for bucket in previous.values() for kept in bucket if kept):
                    self._insert(point)
        self._last_point = list(points[-1:]) or self._last_point

    def points(self) -> list[Point]:
        """Returns the kept points in order of steps."""
        points = {point for bucket in self._buckets.values() for point in bucket if point}
        return sorted(points | set(self._last_point), key=lambda point: point[0])

    def _insert(self, point: Point) -> None:
        bucket = self._buckets.setdefault(int(point[0] // self._bucket_length), [None, None, None])
        lowest, highest, gap = bucket
        if (y := point[1]) is None:
            bucket[2] = gap or point
            return
        if lowest is None or y < (lowest[1] or 0.0):
            bucket[0] = point
        if highest is None or y > (highest[1] or 0.0):
            bucket[1] = point


class Curves:
    """Curves of several metrics of one run, which are updated incrementally."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._reset()

    def _reset(self) -> None:
        self._curves = {name: DownsampledCurve() for name in self._names}
        self._count = 0
        self._ends: tuple[Any, Any] = (None, None)

    def update(self, metrics: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
        """Returns metric → points.

        Args:
            metrics: the lines of the previous call with new lines appended. Any other lines reset the curves.
        """
        num_known = self._count
        if num_known and (len(metrics) < num_known or (metrics[0], metrics[num_known - 1]) != self._ends):
            self._reset()
            num_known = 0
        for name, one in self._curves.items():
            one.add(curve(metrics[num_known:], name))
        self._count = len(metrics)
        self._ends = (metrics[0], metrics[-1]) if metrics else (None, None)
        return {name: one.points() for name, one in self._curves.items()}
