"""Compares the forecast at the start of a run with its actual figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxlm.formatting import DASH, format_bytes, format_dollars, format_duration, format_si
from maxlm.reporting.drawing.html import Markup, note, section, table
from maxlm.reporting.sections.run_summary import ReportedRun, ratio
from maxlm.storage.json_fields import mapping, number


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


def plan_vs_actual(runs: Sequence[ReportedRun]) -> Markup:
    """Returns a table of planned and actual values and their ratio; '' if no run has a plan."""
    planned = [run for run in runs if mapping(run.started, 'plan')]
    rows: list[list[str]] = []
    for row in _ROWS:
        cells = []
        for run in planned:
            predicted, actual = number(mapping(run.started, 'plan'), row.key), row.actual(run)
            quotient = ratio(actual, predicted)
            values = [
                row.write(predicted),
                row.write(actual),
                DASH if quotient is None else f'{quotient:.2f}',
            ]
            cells += values if len(runs) == 1 else [f'{values[0]} → {values[1]} ({values[2]})']
        rows.append([row.name, *cells])
    if not planned:
        return Markup('')
    header = ['', *(['planned', 'actual', 'ratio'] if len(runs) == 1 else [run.name for run in planned])]
    words = 'Step time and throughput are medians over the log lines; the ratio is actual / planned.'
    if len(runs) > 1:
        words = f'Planned → actual (ratio). {words}'
    unfinished = [run for run in planned if run.num_steps and (run.step or 0) < run.num_steps]
    if unfinished:
        words += ' The plan covers the full run; time and cost of an unfinished run are those so far.'
    return section('plan', 'Plan vs. actual', table(header, rows), note(words))


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else hours * 3600
