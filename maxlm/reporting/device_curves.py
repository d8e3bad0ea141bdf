"""Readings of devices and hosts over time: one curve each, or summaries of many."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.reporting.curves import Point, break_at_gaps, finite
from maxlm.storage.json_fields import items, number, text

# If there are more curves, they are replaced by three: the mean, the lowest and the highest.
MAX_CURVES = 8
# Number of time bins of these summaries.
_BINS = 300
# A pause is a gap if its length exceeds the median interval by this factor.
_GAP_FACTOR = 4.0

Curves = dict[str, list[Point]]


def host_curves(by_process: Mapping[int, Sequence[Any]], key: str, *, start_time: float, factor: float = 1.0) -> Curves:
    """Returns host name → (seconds since `start_time`, value) of one reading."""
    curves: Curves = {}
    for process, lines in by_process.items():
        name = _host(process, lines, len(by_process))
        curves[name] = [point for line in lines if (point := _point(line, line, key, start_time, factor))]
    return _nonempty(curves)


def device_curves(
    by_process: Mapping[int, Sequence[Any]], key: str, *, start_time: float, factor: float = 1.0
) -> Curves:
    """Returns device name → (seconds since `start_time`, value) of one reading."""
    curves: Curves = {}
    for process, lines in by_process.items():
        host = _host(process, lines, len(by_process))
        for line in lines:
            for device in items(line, 'devices'):
                if point := _point(line, device, key, start_time, factor):
                    curves.setdefault(device_name(host, device), []).append(point)
    return _nonempty(curves)


def device_name(host: str, device: Any) -> str:
    """Returns the device's name, e.g. `device 3`, or `host0: device 3` if there are several hosts."""
    return f'{f"{host}: " if host else ""}device {text(device, "index")}'


def summarize_curves(curves: Curves) -> Curves:
    """Returns the curves, or if there are many, the mean, the lowest and the highest in each time bin."""
    if len(curves) <= MAX_CURVES:
        return {name: break_at_gaps(points, _max_gap(points)) for name, points in curves.items()}
    summaries = {'mean': statistics.fmean, 'lowest': min, 'highest': max}
    return {f'{name} of {len(curves)}': bin_curves(curves, of) for name, of in summaries.items()}


def bin_curves(curves: Curves, summary: Any) -> list[Point]:
    """Combines curves into one: the summary of all values in each time bin."""
    points = sorted(point for curve in curves.values() for point in finite(curve))
    if not points:
        return []
    # Bins are at least two reading intervals long, so that each bin contains readings of all curves.
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
