"""Compares the forecast at the start of a run with its actual figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maxlm.formatting import DASH, format_bytes, format_dollars, format_duration, format_si
from maxlm.reporting.run_summary import ReportedRun, ratio
from maxlm.storage.json_fields import number

# Figure → its key in the plan, its format, and its actual value.
_FIGURES: dict[str, tuple[str, Callable[[float | None], str], Callable[[ReportedRun], float | None]]] = {
    'step time': ('step_seconds', format_duration, lambda run: run.median('perf/step_time_seconds')),
    'tokens per second': ('tokens_per_second', format_si, lambda run: run.median('perf/tokens_per_second')),
    'device memory': ('memory_bytes', format_bytes, lambda run: run.memory_bytes),
    'wall time': ('hours', format_duration, lambda run: run.wall_seconds),
    'cost': ('dollars', format_dollars, lambda run: run.dollars),
}


def plan_rows(runs: Sequence[ReportedRun], several: bool) -> list[list[str]]:
    """Returns the known figures of runs with a plan: planned, actual, ratio; in one column per run for several runs."""
    rows = []
    for name, (key, write, actual_of) in _FIGURES.items():
        # The plan has hours, and runs have seconds.
        unit = 3600.0 if key == 'hours' else 1.0
        plans = [number(run.plan, key) for run in runs]
        pairs = [(plan and plan * unit, actual_of(run)) for plan, run in zip(plans, runs, strict=True)]
        cells: list[str] = []
        for predicted, actual in pairs:
            quotient = ratio(actual, predicted)
            texts = [write(predicted), write(actual), DASH if quotient is None else f'{quotient:.2f}']
            cells += [f'{texts[0]} → {texts[1]} ({texts[2]})'] if several else texts
        if any(value is not None for pair in pairs for value in pair):
            rows.append([name, *cells])
    return rows
