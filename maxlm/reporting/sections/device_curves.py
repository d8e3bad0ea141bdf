"""Readings of devices and hosts over time: a curve for each, or of all together where they are many."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.reporting.drawing.curves import Point, break_at_gaps, finite
from maxlm.storage.json_fields import items, number, text

# More curves than these become three: the mean, the lowest and the highest.
MAX_CURVES = 8
# Stretches of time that these are taken over.
_BINS = 300
# A pause so many times as long as the usual one is a gap.
_GAP_FACTOR = 4.0

Curves = dict[str, list[Point]]


def host_curves(by_process: Mapping[int, Sequence[Any]], key: str, *, start_time: float, factor: float = 1.0) -> Curves:
    """name of host → (seconds since `start_time`, value) of one reading of it."""
    curves: Curves = {}
    for process, lines in by_process.items():
        name = _host(process, lines, len(by_process))
        curves[name] = [point for line in lines if (point := _point(line, line, key, start_time, factor))]
    return _nonempty(curves)


def device_curves(
    by_process: Mapping[int, Sequence[Any]], key: str, *, start_time: float, factor: float = 1.0
) -> Curves:
    """name of device → (seconds since `start_time`, value) of one reading of it."""
    curves: Curves = {}
    for process, lines in by_process.items():
        host = _host(process, lines, len(by_process))
        for line in lines:
            for device in items(line, 'devices'):
                if point := _point(line, device, key, start_time, factor):
                    curves.setdefault(device_name(host, device), []).append(point)
    return _nonempty(curves)


def device_name(host: str, device: Any) -> str:
    """device 3, or host0: device 3 where there are several hosts."""
    return f'{f"{host}: " if host else ""}device {text(device, "index")}'


def summarize_curves(curves: Curves) -> Curves:
    """The curves as they are; of many the mean, the lowest and the highest in each stretch of time."""
    if len(curves) <= MAX_CURVES:
        return {name: break_at_gaps(points, _max_gap(points)) for name, points in curves.items()}
    summaries = {'mean': statistics.fmean, 'lowest': min, 'highest': max}
    return {f'{name} of {len(curves)}': bin_curves(curves, of) for name, of in summaries.items()}


def bin_curves(curves: Curves, summary: Any) -> list[Point]:
    """One curve of all: in each stretch of time the summary of all values."""
    points = sorted(point for curve in curves.values() for point in finite(curve))
    if not points:
        return []
    # No finer than the readings come, so that each stretch has some of all.
    width = max((points[-1][0] - points[0][0]) / _BINS, *(2 * _interval(curve) for curve in curves.values()), 1e-3)
    bins: dict[int, list[float]] = {}
    for time, value in points:
        bins.setdefault(int(time / width), []).append(value)
    return break_at_gaps(
        [((index + 0.5) * width, summary(values)) for index, values in bins.items()], _GAP_FACTOR * width
    )


def _host(process: int, lines: Sequence[Any], num_processes: int) -> str:
    if num_processes == 1:
        return ''
    name = text(lines[-1], 'host') if lines else ''
    return f'{name or "process"} ({process})'


def _point(line: Any, source: Any, key: str, start_time: float, factor: float) -> Point | None:
    time, value = number(line, 'time'), number(source, key)
    return None if time is None or value is None else (time - start_time, value * factor)


def _nonempty(curves: Curves) -> Curves:
    return {name: points for name, points in curves.items() if points}


def _interval(points: Sequence[Point]) -> float:
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    return statistics.median(steps) if steps else 0.0


def _max_gap(points: Sequence[Point]) -> float:
    return _GAP_FACTOR * _interval(points)
