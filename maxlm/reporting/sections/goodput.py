"""Goodput: time by category, for each attempt and in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from maxlm.formatting import format_dollars, format_duration, format_int, format_percent, format_time
from maxlm.reporting.drawing.bars import Bar, draw_bars, swatch
from maxlm.reporting.drawing.html import Markup, join, note, section, table, tag
from maxlm.reporting.sections.run_summary import ReportedRun
from maxlm.telemetry.goodput import Attempt

WORDS = {
    'step': 'productive steps',
    'rollout': 'rollouts',
    'evaluation': 'evaluation',
    'checkpoint': 'saving checkpoints',
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


def goodput(runs: Sequence[ReportedRun]) -> Markup:
    """Returns bars and tables; '' if no run has a goodput log."""
    if len(runs) > 1:
        bars = [Bar(run.name, run.goodput_log.totals) for run in runs if run.goodput_log]
        header = ['', *(bar.name for bar in bars)]
        rows = _rows([bar.seconds_by_category for bar in bars])
        parts = [draw_bars(bars, title='All attempts of each run', labels=WORDS), table(header, rows) if bars else '']
        return section('time', 'Time by category', *parts)
    run = runs[0]
    if run.goodput_log is None or not run.goodput_log.attempts:
        return Markup('')
    totals, attempts = run.goodput_log.totals, run.goodput_log.attempts[-_MAX_ATTEMPTS:]
    words = note(
        f'{format_percent(run.goodput_log.fraction)} of {format_duration(run.goodput_log.seconds)} was spent on '
        f'productive steps{_cost_text(run)}.'
    )
    several = len(run.goodput_log.attempts) > 1
    bars = [Bar('total', totals), *(_attempt_bar(attempt) for attempt in attempts if several)]
    parts = [words, draw_bars(bars, title='Process 0 (represents the run)', labels=WORDS)]
    if len(run.goodput_log.attempts) > len(attempts):
        parts.append(note(f'The total includes {len(run.goodput_log.attempts) - len(attempts)} earlier attempts.'))
    header = ['', 'time', 'share', *(f'attempt {attempt.number}' for attempt in attempts if several)]
    parts.append(table(header, _attempt_rows(totals, attempts if several else [])))
    return section(
        'time', 'Time by category', *parts, _hosts(run), _steps_of_attempts(run, attempts) if several else ''
    )


def _attempt_bar(attempt: Attempt) -> Bar:
    return Bar(f'attempt {attempt.number}', attempt.seconds)


def _attempt_rows(totals: dict[str, float], attempts: Sequence[Attempt]) -> list[list[Markup | str]]:
    total = sum(totals.values()) or 1.0
    rows = []
    for category, words in WORDS.items():
        name = join(swatch(category), words)
        shares = [format_duration(totals[category]), format_percent(totals[category] / total)]
        rows.append([name, *shares, *(format_duration(attempt.seconds[category]) for attempt in attempts)])
    sums = [format_duration(sum(attempt.seconds.values())) for attempt in attempts]
    rows.append([tag('b', 'all'), format_duration(sum(totals.values())), format_percent(1.0), *sums])
    return rows


def _rows(columns: Sequence[Mapping[str, float]]) -> list[list[Markup | str]]:
    rows = []
    for category, words in WORDS.items():
        cells = []
        for parts in columns:
            fraction = parts[category] / (sum(parts.values()) or 1.0)
            cells.append(f'{format_duration(parts[category])} ({format_percent(fraction)})')
        rows.append([join(swatch(category), words), *cells])
    rows.append([tag('b', 'all'), *(format_duration(sum(parts.values())) for parts in columns)])
    return rows


def _hosts(run: ReportedRun) -> Markup:
    goodput_logs = {
        process: goodput_log for process, goodput_log in run.history.goodput_logs.items() if goodput_log.attempts
    }
    if len(goodput_logs) < 2:
        return Markup('')
    shown = list(goodput_logs.items())[:_MAX_HOSTS]
    bars = [
        Bar(f'process {process}, {goodput_log.attempts[-1].host}', goodput_log.totals) for process, goodput_log in shown
    ]
    more = (
        note(f'{len(goodput_logs) - len(shown)} more processes have goodput logs.')
        if len(goodput_logs) > len(shown)
        else ''
    )
    return join(draw_bars(bars, title='Time of each process', labels=WORDS), more)


def _steps_of_attempts(run: ReportedRun, attempts: Sequence[Attempt]) -> Markup:
    rows = []
    for attempt in attempts:
        steps = f'{format_int(attempt.start_step)} to {format_int(attempt.step)}'
        how = 'exited' if attempt.is_closed else 'no final record: killed or still running'
        money = format_dollars(attempt.dollars)
        rows.append(
            [
                f'attempt {attempt.number}',
                steps,
                format_time(attempt.start_time),
                format_time(attempt.time),
                money,
                how,
            ]
        )
    header = ['', 'steps', 'start', 'last record', 'cost', 'end']
    return table(header, rows, texts=(0, 2, 3, 5))


def _cost_text(run: ReportedRun) -> str:
    if run.dollars is None or run.goodput_log is None:
        return ''
    return f', {format_dollars(run.dollars * run.goodput_log.fraction)} of {format_dollars(run.dollars)}'
