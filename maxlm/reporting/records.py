"""Selects the events and samples to show, with their texts shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import number, text

# Frequent kinds of events, which are dropped first if there are too many rows.
_ROUTINE = frozenset({'saved', 'evaluated', 'compiled'})
_MAX_EVENTS, _MAX_EVENT_CHARS = 300, 500
_MAX_PROMPTS, _MAX_STEPS, _MAX_CHARS = 8, 12, 2000


def shown_events(runs: Sequence[ReportedRun]) -> tuple[list[dict[str, Any]], int]:
    """Returns the events of all runs by time, each with its run and whether it is an error; and the number omitted."""
    found = [(run, event) for run in runs for event in run.history.events]
    found.sort(key=lambda pair: number(pair[1], 'time') or 0.0)
    shown = found
    if len(shown) > _MAX_EVENTS:
        shown = [pair for pair in shown if text(pair[1], 'kind') not in _ROUTINE]
    if len(shown) > _MAX_EVENTS:
        # Keep the first and the last events.
        shown = shown[: _MAX_EVENTS // 3] + shown[-2 * _MAX_EVENTS // 3 :]
    rows = []
    for run, event in shown:
        kind = text(event, 'kind')
        row: dict[str, Any] = {name: number(event, name) for name in ('time', 'life', 'step')}
        row |= {'run': run.name, 'kind': kind, 'message': shorten(text(event, 'message'), _MAX_EVENT_CHARS)}
        rows.append({**row, 'is_error': event.get('alert') is True or kind in ('failed', 'diverged')})
    return rows, len(found) - len(shown)


def shown_samples(run: ReportedRun) -> tuple[list[tuple[str, list[tuple[float | None, str]], int]], int]:
    """Returns (prompt, (step, text) newest first, number of all samples) for each prompt, and the number of omitted
    prompts.
    """
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.history.samples:
        by_prompt.setdefault(text(line, 'prompt'), []).append(line)
    shown = []
    for prompt, lines in list(by_prompt.items())[:_MAX_PROMPTS]:
        texts = [(number(line, 'step'), shorten(text(line, 'text'), _MAX_CHARS)) for line in _evenly_spaced(lines)]
        shown.append((' '.join(prompt.split())[:120], texts[::-1], len(lines)))
    return shown, len(by_prompt) - len(shown)


def shorten(text: str, length: int) -> str:
    """Returns a text of at most `length` characters, with an ellipsis if it is longer."""
    return text if len(text) <= length else f'{text[:length]} …'


def _evenly_spaced(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most _MAX_STEPS evenly spaced lines, including the first and the last."""
    if len(lines) <= _MAX_STEPS:
        return list(lines)
    return [lines[index * (len(lines) - 1) // (_MAX_STEPS - 1)] for index in range(_MAX_STEPS)]
