"""Devices and hosts over time: utilization, memory, temperature, power and throttling."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.formatting import DASH, GIB, format_bytes, format_int, format_percent
from maxlm.reporting.charts import Chart, Series, lower_title
from maxlm.reporting.device_curves import Curves, bin_curves, device_curves, host_curves, summarize_curves
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import items, number, text


class _Reading(NamedTuple):
    """A chart of one reading."""

    key: str
    title: str
    unit: str
    factor: float = 1.0


_OF_DEVICES = (
    _Reading('use_percent', 'Device utilization', '%'),
    _Reading('memory_bytes', 'Device memory', 'GiB', 1 / GIB),
    _Reading('temperature_c', 'Temperature', '°C'),
    _Reading('power_w', 'Power', 'W'),
    _Reading('clock_mhz', 'Clock', 'MHz'),
)
_OF_HOSTS = (
    _Reading('cpu_percent', 'Host CPU', '% of all cores'),
    _Reading('ram_bytes', 'Host memory', 'GiB', 1 / GIB),
    _Reading('disk_free_bytes', 'Free disk space of the workdir', 'GiB', 1 / GIB),
    _Reading('disk_write_bytes_per_second', 'Disk writes', 'MB/s', 1e-6),
    _Reading('net_received_bytes_per_second', 'Network received', 'MB/s', 1e-6),
)


def device_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns charts over the time since each run started."""
    charts = [_chart(runs, reading, device_curves) for reading in _OF_DEVICES]
    charts += [_chart(runs, reading, host_curves) for reading in _OF_HOSTS]
    return [chart for chart in charts if chart]


def _chart(runs: Sequence[ReportedRun], reading: _Reading, curves_of: Callable[..., Curves]) -> Chart:
    def curves(run: ReportedRun) -> Curves:
        return curves_of(run.history.devices, reading.key, start_time=run.start_time, factor=reading.factor)

    if len(runs) == 1:
        named = summarize_curves(curves(runs[0]))
        series = [
            Series(name or lower_title(reading.title), points, number)
            for number, (name, points) in enumerate(named.items())
        ]
        marks = runs[0].time_marks
    else:
        series = [Series(f'{run.name}, mean', bin_curves(curves(run), statistics.fmean), run.color) for run in runs]
        marks = []
    return Chart(reading.title, reading.unit, series, x='time', marks=marks, scale='zero')


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


def _device(readings: Sequence[Mapping[str, Any]]) -> list[str]:
    def values(key: str) -> list[float]:
        return [value for reading in readings if (value := number(reading, key)) is not None]

    def over(key: str, summary: Callable[[list[float]], float]) -> float | None:
        return summary(values(key)) if values(key) else None

    use, power, hottest = (
        over('use_percent', statistics.fmean),
        over('power_w', statistics.fmean),
        values('temperature_c'),
    )
    reasons = Counter(str(reason) for reading in readings for reason in items(reading, 'throttled'))
    throttled = ', '.join(f'{format_percent(count / len(readings))} {reason}' for reason, count in reasons.items())
    total = over('memory_total_bytes', max)
    return [
        text(readings[-1], 'kind'),
        format_percent(None if use is None else use / 100),
        format_bytes(over('memory_bytes', max)) + (f' of {format_bytes(total)}' if total else ''),
        f'{max(hottest):.0f} °C' if hottest else DASH,
        f'{power:,.0f} W' if power is not None else DASH,
        throttled or ('never' if any('throttled' in reading for reading in readings) else DASH),
        format_int(over('ecc_errors', max)),
    ]
