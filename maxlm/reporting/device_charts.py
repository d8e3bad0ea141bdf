"""Devices and hosts over time: utilization, memory, temperature, power and throttling."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.formatting import DASH, GIB, format_bytes, format_int, format_percent
from maxlm.reporting.charts import Chart, Series, lower_title
from maxlm.reporting.curves import Point, break_at_gaps, finite
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import items, number, text

# If there are more curves, they are replaced by three: the mean, the lowest and the highest in each time bin.
MAX_CURVES, _BINS = 8, 300
# A pause is a gap if its length exceeds the median interval by this factor.
_GAP_FACTOR = 4.0

Curves = dict[str, list[Point]]


class DeviceMetric(NamedTuple):
    """A chart of one reading of each accelerator or each host."""

    key: str
    title: str
    unit: str
    factor: float = 1.0
    of_host: bool = False


DEVICE_METRICS = (
    DeviceMetric('use_percent', 'Device utilization', '%'),
    DeviceMetric('memory_bytes', 'Device memory', 'GiB', 1 / GIB),
    DeviceMetric('temperature_c', 'Temperature', '°C'),
    DeviceMetric('power_w', 'Power', 'W'),
    DeviceMetric('clock_mhz', 'Clock', 'MHz'),
    DeviceMetric('cpu_percent', 'Host CPU', '% of all cores', of_host=True),
    DeviceMetric('ram_bytes', 'Host memory', 'GiB', 1 / GIB, of_host=True),
    DeviceMetric('disk_free_bytes', 'Free disk space of the workdir', 'GiB', 1 / GIB, of_host=True),
    DeviceMetric('disk_write_bytes_per_second', 'Disk writes', 'MB/s', 1e-6, of_host=True),
    DeviceMetric('net_received_bytes_per_second', 'Network received', 'MB/s', 1e-6, of_host=True),
)


def device_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns charts over the time since each run started."""
    return [chart for reading in DEVICE_METRICS if (chart := _chart(runs, reading))]


def reading_curves(by_process: Mapping[int, Sequence[Any]], reading: DeviceMetric, start_time: float) -> Curves:
    """Returns the name of a device or host → (seconds since `start_time`, value) of one reading."""
    curves: Curves = {}
    for process, lines in by_process.items():
        host = f'{text(lines[-1], "host") or "process"} ({process})' if lines and len(by_process) > 1 else ''
        for line in lines:
            time = number(line, 'time')
            for source in [line] if reading.of_host else items(line, 'devices'):
                name = host if reading.of_host else f'{f"{host}: " if host else ""}device {text(source, "index")}'
                value = number(source, reading.key)
                if time is not None and value is not None:
                    curves.setdefault(name, []).append((time - start_time, value * reading.factor))
    return curves


def summarize_curves(curves: Curves) -> Curves:
    """Returns the curves, or if there are many, the mean, the lowest and the highest in each time bin."""
    if len(curves) <= MAX_CURVES:
        return {name: break_at_gaps(points, _GAP_FACTOR * _interval(points)) for name, points in curves.items()}
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
    binned: list[Point] = [((index + 0.5) * width, summary(values)) for index, values in bins.items()]
    return break_at_gaps(binned, _GAP_FACTOR * width)


def device_rows(run: ReportedRun) -> list[list[str]]:
    """Returns kind, mean use, peak memory, extremes, throttling and memory errors of each device."""
    rows = []
    for process, lines in run.history.devices.items():
        readings: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            for device in items(line, 'devices'):
                readings.setdefault(text(device, 'index'), []).append(device)
        host = text(lines[-1], 'host') or f'process {process}'
        rows += [[f'{host}: {index}', *_device(device_readings)] for index, device_readings in readings.items()]
    return rows


def _chart(runs: Sequence[ReportedRun], reading: DeviceMetric) -> Chart:
    curves = [reading_curves(run.history.devices, reading, run.start_time) for run in runs]
    if len(runs) == 1:
        named = enumerate(summarize_curves(curves[0]).items())
        series = [Series(name or lower_title(reading.title), points, color) for color, (name, points) in named]
    else:
        means = [bin_curves(one, statistics.fmean) for one in curves]
        series = [Series(f'{run.name}, mean', mean, run.color) for run, mean in zip(runs, means, strict=True)]
    marks = runs[0].time_marks if len(runs) == 1 else []
    return Chart(reading.title, reading.unit, series, x='time', marks=marks, scale='zero')


def _device(readings: Sequence[Mapping[str, Any]]) -> list[str]:
    def over(key: str, summary: Callable[[list[float]], float]) -> float | None:
        values = [value for reading in readings if (value := number(reading, key)) is not None]
        return summary(values) if values else None

    use, power = over('use_percent', statistics.fmean), over('power_w', statistics.fmean)
    degrees, total = over('temperature_c', max), over('memory_total_bytes', max)
    reasons = Counter(str(reason) for reading in readings for reason in items(reading, 'throttled'))
    throttled = ', '.join(f'{format_percent(count / len(readings))} {reason}' for reason, count in reasons.items())
    return [
        text(readings[-1], 'kind'),
        format_percent(None if use is None else use / 100),
        format_bytes(over('memory_bytes', max)) + (f' of {format_bytes(total)}' if total else ''),
        f'{degrees:.0f} °C' if degrees is not None else DASH,
        f'{power:,.0f} W' if power is not None else DASH,
        throttled or ('never' if any('throttled' in reading for reading in readings) else DASH),
        format_int(over('ecc_errors', max)),
    ]


def _interval(points: Sequence[Point]) -> float:
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    return statistics.median(steps) if steps else 0.0
