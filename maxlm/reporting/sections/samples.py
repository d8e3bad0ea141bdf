"""Samples that the model generated at its evaluations, by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.formatting import format_int
from maxlm.reporting.drawing.html import Markup, code, join, note, section, tag
from maxlm.reporting.sections.run_summary import ReportedRun
from maxlm.storage.json_fields import number, text

_MAX_PROMPTS, _MAX_STEPS, _MAX_CHARS = 8, 12, 2000


def samples(runs: Sequence[ReportedRun]) -> Markup:
    """Returns the newest text for each prompt, with earlier ones collapsed; '' if there are no samples."""
    parts = []
    for run in runs:
        by_prompt: dict[str, list[Mapping[str, Any]]] = {}
        for line in run.history.samples:
            by_prompt.setdefault(text(line, 'prompt'), []).append(line)
        prefix = f'{run.name}: ' if len(runs) > 1 else ''
        parts += [_prompt(prefix, prompt, lines) for prompt, lines in list(by_prompt.items())[:_MAX_PROMPTS]]
        if len(by_prompt) > _MAX_PROMPTS:
            parts.append(note(f'{prefix}{len(by_prompt) - _MAX_PROMPTS} more prompts are only in samples.jsonl.'))
    return section('samples', 'Samples', *parts)


def _prompt(prefix: str, prompt: str, lines: Sequence[Mapping[str, Any]]) -> Markup:
    heading = tag('h3', f'{prefix}“{" ".join(prompt.split())[:120]}”')
    *earlier, newest = _evenly_spaced(lines)
    parts = [heading, _sample(newest)]
    if earlier:
        label = f'{len(earlier)} earlier' + (f' of {len(lines) - 1}' if len(lines) - 1 > len(earlier) else '')
        parts.append(tag('details', tag('summary', label), *map(_sample, reversed(earlier))))
    return join(*parts)


def _sample(line: Mapping[str, Any]) -> Markup:
    words = text(line, 'text')
    shown = words if len(words) <= _MAX_CHARS else f'{words[:_MAX_CHARS]} …'
    return join(tag('div', f'step {format_int(number(line, "step"))}', class_='unit'), code(shown))


def _evenly_spaced(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most _MAX_STEPS evenly spaced lines, including the first and the last."""
    if len(lines) <= _MAX_STEPS:
        return list(lines)
    return [lines[index * (len(lines) - 1) // (_MAX_STEPS - 1)] for index in range(_MAX_STEPS)]
