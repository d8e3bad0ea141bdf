"""Curves of runs of any length, in few points, at the cost of what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maxlm.reporting.drawing.curves import Point, curve

# Stretches of a curve, of each of which the lowest and the highest value are kept.
MAX_STRETCHES = 2000


class DownsampledCurve:
    """One curve: the lowest and the highest point of each stretch of steps, whether it has a gap, and the newest point.

    Stretches become twice as long whenever there are too many, so old points are kept as densely as new ones.
    """

    def __init__(self, max_stretches: int = MAX_STRETCHES):
        self._max_stretches = max_stretches
        self._length = 1.0
        # Number of the stretch → lowest and highest point, and one without a value.
        self._stretches: dict[int, list[Point | None]] = {}
        self._newest: list[Point] = []

    def add(self, points: Sequence[Point]) -> None:
        """More of the curve."""
        for start in range(0, len(points), self._max_stretches):
            for point in points[start : start + self._max_stretches]:
                self._put(point)
            while len(self._stretches) > self._max_stretches:
                before, self._stretches = self._stretches, {}
                self._length *= 2
                for point in (one for stretch in before.values() for one in stretch if one):
                    self._put(point)
        self._newest = list(points[-1:]) or self._newest

    def points(self) -> list[Point]:
        """All that is kept, by step."""
        kept = {point for stretch in self._stretches.values() for point in stretch if point}
        return sorted(kept | set(self._newest), key=lambda point: point[0])

    def _put(self, point: Point) -> None:
        stretch = self._stretches.setdefault(int(point[0] // self._length), [None, None, None])
        lowest, highest, gap = stretch
        if (y := point[1]) is None:
            stretch[2] = gap or point
            return
        if lowest is None or y < (lowest[1] or 0.0):
            stretch[0] = point
        if highest is None or y > (highest[1] or 0.0):
            stretch[1] = point


class Curves:
    """Several curves of the metrics of one run, which is read again and again."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: DownsampledCurve() for name in self._names}
        self._count = 0
        self._ends: tuple[Any, Any] = (None, None)

    def of(self, metrics: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
        """metric → its points.

        Args:
            metrics: those of the last call with more behind them, or others.
        """
        known = self._count
        if known and (len(metrics) < known or (metrics[0], metrics[known - 1]) != self._ends):
            self._forget()
            known = 0
        for name, one in self._curves.items():
            one.add(curve(metrics[known:], name))
        self._count = len(metrics)
        self._ends = (metrics[0], metrics[-1]) if metrics else (None, None)
        return {name: one.points() for name, one in self._curves.items()}
