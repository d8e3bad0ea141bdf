"""Goodput: time by category of runs, attempts and processes, as bars and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxlm.formatting import format_duration, format_percent
from maxlm.reporting.run_summary import ReportedRun
from maxlm.telemetry.goodput import Attempt

# Category → label, in the order of a bar.
LABELS = {
    'step': 'productive steps',
    'rollout': 'generating rollouts',
    'reward_wait': 'waiting for rewards',
    'tool_wait': 'waiting for tools or environments',
    'evaluation': 'evaluation',
    'checkpoint': 'saving checkpoints',
    'replay': 'computing steps again',
    'data_wait': 'waiting for data',
    'compile': 'compiling',
    'start': 'starting',
    'restore': 'restoring checkpoints',
    'other': 'other',
    'lost': 'lost steps (repeated)',
    'idle': 'idle between attempts',
}
# Maximum numbers of attempts (the newest) and hosts with their own bar.
_MAX_ATTEMPTS, _MAX_HOSTS = 12, 16


class Bar(NamedTuple):
    """A name and the seconds of each category."""

    name: str
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """Returns (category, start, duration) of each segment of the bar, in seconds."""
        parts, start = [], 0.0
        for category in LABELS:
            if (length := self.seconds.get(category, 0.0)) > 0:
                parts.append((category, start, length))
                start += length
        return parts

    @property
    def description(self) -> str:
        percentages = (f'{LABELS[category]} {length / self.total:.0%}' for category, _, length in self.parts)
        return f'{self.name}: {", ".join(percentages)}'


def bars(runs: Sequence[ReportedRun]) -> list[Bar]:
    """Returns a bar per run, or the total and the newest attempts of a single run."""
    if len(runs) > 1:
        return [Bar(run.name, run.goodput_log.totals) for run in runs if run.goodput_log]
    log = runs[0].goodput_log
    if log is None or not log.attempts:
        return []
    attempts = [Bar(f'attempt {attempt.number}', attempt.seconds) for attempt in shown_attempts(runs[0])]
    return [Bar('total', log.totals), *attempts]


def process_bars(run: ReportedRun) -> tuple[list[Bar], int]:
    """Returns a bar per process and the number of further processes; none if there is only one process."""
    logs = {process: log for process, log in run.history.goodput_logs.items() if log.attempts}
    shown = list(logs.items())[:_MAX_HOSTS] if len(logs) > 1 else []
    named = [Bar(f'process {process}, {log.attempts[-1].host}', log.totals) for process, log in shown]
    return named, len(logs) - len(shown) if shown else 0


def shown_attempts(run: ReportedRun) -> list[Attempt]:
    """Returns the newest attempts; none if there is only one attempt."""
    attempts = run.goodput_log.attempts if run.goodput_log else []
    return attempts[-_MAX_ATTEMPTS:] if len(attempts) > 1 else []


def categories(shown: Sequence[Bar]) -> list[str]:
    """Returns the categories that at least one bar contains."""
    return [category for category in LABELS if any(bar.seconds.get(category) for bar in shown)]


def category_rows(shown: Sequence[Bar]) -> list[tuple[str, list[str]]]:
    """Returns (category, time in each bar with its percentage), and a row '' with the sums."""
    rows = [
        (category, [_with_percentage(bar.seconds.get(category, 0.0), bar.total) for bar in shown])
        for category in categories(shown)
    ]
    return [*rows, ('', [_with_percentage(bar.total, bar.total) for bar in shown])]


def _with_percentage(seconds: float, total: float) -> str:
    return f'{format_duration(seconds)} ({format_percent(seconds / (total or 1.0))})'
