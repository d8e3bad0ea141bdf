"""Scaling efficiency: throughput per device of attempts with different numbers of devices."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from maxlm.formatting import format_percent, format_si, plural
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import mapping, number, text

# Metric of the accelerators' mean utilization.
UTILIZATION = 'device/utilization_percent'


class AttemptThroughput(NamedTuple):
    """Median tokens/s of one attempt, over all devices."""

    run: str
    attempt: int
    kind: str
    parameters: float | None
    num_devices: int
    tokens_per_second: float

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.num_devices


def scaling_rows(attempts: Sequence[AttemptThroughput]) -> list[list[str]]:
    """Returns run, attempt, devices, tokens/s, tokens/s per device and efficiency, by number of devices."""
    return [
        [
            one.run,
            str(one.attempt),
            f'{one.num_devices} × {one.kind}',
            format_si(one.tokens_per_second),
            format_si(one.per_device),
            format_percent(efficiency(one, attempts)),
        ]
        for one in sorted(attempts, key=lambda one: (one.num_devices, one.run, one.attempt))
    ]


def throughputs(run: ReportedRun) -> list[AttemptThroughput]:
    """Returns the throughput of each attempt. A line belongs to the latest attempt that had started by its time."""
    starts = [(time, event) for event in run.start_events if (time := number(event, 'time')) is not None]
    rates: dict[int, list[float]] = {}
    for line in run.history.metrics:
        time, rate = number(line, 'time'), number(line, 'perf/tokens_per_second')
        if time is not None and rate is not None and starts:
            index_of_attempt = bisect.bisect_right([start for start, _ in starts], time) - 1
            rates.setdefault(max(0, index_of_attempt), []).append(rate)
    attempts = []
    for index, values in sorted(rates.items()):
        event = starts[index][1]
        devices = mapping(event, 'devices')
        attempts.append(
            AttemptThroughput(
                run=run.name,
                attempt=int(number(event, 'life') or index + 1),
                kind=text(devices, 'kind'),
                parameters=number(event, 'parameters'),
                num_devices=max(1, int(number(devices, 'count') or 1)),
                tokens_per_second=statistics.median(values),
            )
        )
    return attempts


def closing_line(run: ReportedRun) -> str:
    """Returns the throughput of the newest attempt and its scaling efficiency in one line; '' without measurements.

    The efficiency is relative to attempts of the run on fewer devices. The use of the devices is the mean of all
    samples, where the accelerator reports it.
    """
    attempts = throughputs(run)
    if not attempts:
        return ''
    newest = attempts[-1]
    fewest = min(one.num_devices for one in attempts if (one.kind, one.parameters) == (newest.kind, newest.parameters))
    parts = [
        f'{newest.num_devices} × {newest.kind}: {format_si(newest.tokens_per_second)} tokens/s',
        f'{format_si(newest.per_device)} per device',
    ]
    if fewest < newest.num_devices:
        relative = format_percent(efficiency(newest, attempts))
        parts.append(f'scaling efficiency {relative} relative to {plural(fewest, "device")}')
    elif newest.num_devices > 1:
        parts.append('scaling efficiency unknown: no attempt on fewer devices')
    if use := [value for line in run.history.metrics if (value := number(line, UTILIZATION)) is not None]:
        parts.append(f'mean device use {statistics.fmean(use):.0f}%')
    return ', '.join(parts)


def efficiency(one: AttemptThroughput, others: Sequence[AttemptThroughput]) -> float | None:
    """Returns tokens/s per device relative to the comparable attempts on the fewest devices."""
    alike = [other for other in others if (other.kind, other.parameters) == (one.kind, one.parameters)]
    fewest = min(other.num_devices for other in alike)
    reference = statistics.median(other.per_device for other in alike if other.num_devices == fewest)
    return one.per_device / reference if reference else None
