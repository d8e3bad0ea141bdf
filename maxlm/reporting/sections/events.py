"""Events of a run: starts, restarts, saves, alerts, ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.formatting import format_int, format_time
from maxlm.reporting.drawing.html import Markup, note, section, table, tag
from maxlm.reporting.sections.run_summary import ReportedRun
from maxlm.storage.json_fields import number, text

# Frequent kinds of events, which are dropped first if there are too many rows.
_ROUTINE = frozenset({'saved', 'evaluated', 'compiled'})
_MAX_ROWS = 300
_LONGEST = 500


def events(runs: Sequence[ReportedRun]) -> Markup:
    """Returns a table of all events by time; '' if there are none."""
    found = [(run, event) for run in runs for event in run.history.events]
    found.sort(key=lambda pair: number(pair[1], 'time') or 0.0)
    shown = _most_relevant(found)
    num_omitted = len(found) - len(shown)
    several = len(runs) > 1
    header = [*(['run'] if several else []), 'time', 'attempt', 'step', 'kind', 'message']
    rows = [([run.name] if several else []) + _row(event) for run, event in shown]
    first = int(several)
    parts = [table(header, rows, texts=(0, first, first + 3, first + 4), class_='prose') if rows else Markup('')]
    if num_omitted:
        parts.append(note(f'{num_omitted:,} more events, mostly routine, are only in events.jsonl.'))
    return section('events', 'Events', *parts)


def _most_relevant(found: list[tuple[ReportedRun, dict[str, Any]]]) -> list[tuple[ReportedRun, dict[str, Any]]]:
    if len(found) > _MAX_ROWS:
        found = [pair for pair in found if text(pair[1], 'kind') not in _ROUTINE]
    if len(found) > _MAX_ROWS:
        # Keep the first and the last events.
        found = found[: _MAX_ROWS // 3] + found[-2 * _MAX_ROWS // 3 :]
    return found


def _row(event: Mapping[str, Any]) -> list[Markup | str]:
    kind, message = text(event, 'kind'), text(event, 'message')
    if len(message) > _LONGEST:
        message = f'{message[:_LONGEST]} …'
    is_error = event.get('alert') is True or kind in ('failed', 'diverged')
    kind_cell: Markup | str = tag('span', kind, class_='error') if is_error else kind
    attempt, step = format_int(number(event, 'life')), format_int(number(event, 'step'))
    return [format_time(number(event, 'time')), attempt, step, kind_cell, message]
