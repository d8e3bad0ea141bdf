"""Compares the forecast at the start of a run with its actual figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxlm.formatting import DASH, format_bytes, format_dollars, format_duration, format_si
from maxlm.reporting.run_summary import ReportedRun, ratio
from maxlm.storage.json_fields import number


class _Row(NamedTuple):
    """A figure of the plan and its actual value."""

    name: str
    key: str
    write: Callable[[float | None], str]
    actual: Callable[[ReportedRun], float | None]


_ROWS = (
    _Row('step time', 'step_seconds', format_duration, lambda run: run.median('perf/step_time_seconds')),
    _Row('tokens per second', 'tokens_per_second', format_si, lambda run: run.median('perf/tokens_per_second')),
    _Row('device memory', 'memory_bytes', format_bytes, lambda run: run.memory_bytes),
    _Row('wall time', 'hours', lambda hours: format_duration(_seconds(hours)), lambda run: _hours(run.wall_seconds)),
    _Row('cost', 'dollars', format_dollars, lambda run: run.dollars),
)


def plan_rows(runs: Sequence[ReportedRun], several: bool) -> list[list[str]]:
    """Returns the known figures of runs with a plan: planned, actual, ratio; in one column per run for several runs."""
    rows = []
    for row in _ROWS:
        values = [(number(run.plan, row.key), row.actual(run)) for run in runs]
        if all(value is None for pair in values for value in pair):
            continue
        cells: list[str] = []
        for predicted, actual in values:
            quotient = ratio(actual, predicted)
            texts = [row.write(predicted), row.write(actual), DASH if quotient is None else f'{quotient:.2f}']
            cells += [f'{texts[0]} → {texts[1]} ({texts[2]})'] if several else texts
        rows.append([row.name, *cells])
    return rows


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else hours * 3600
