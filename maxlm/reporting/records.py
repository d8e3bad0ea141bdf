"""Selects the events, samples, tokenizers and results of evaluations to show, with their texts shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.formatting import DASH
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import items, mapping, number, text
from maxlm.telemetry.run_history import RunHistory

# Frequent kinds of events, which are dropped first if there are too many rows.
_ROUTINE = frozenset({'saved', 'evaluated', 'compiled'})
_MAX_EVENTS, _MAX_EVENT_CHARS = 300, 500
_MAX_PROMPTS, _MAX_STEPS, _MAX_CHARS = 8, 12, 2000
# The newest sample of a prompt may be a conversation of several turns.
_MAX_NEWEST_CHARS = 10_000
# The end of a prompt distinguishes it from others, since descriptions of tools are at its beginning.
_MAX_HEADING_CHARS = 120
# Names of `maxlm evaluate`.
CORE, BITS_PER_BYTE = 'core', 'bits_per_byte'
# Tokenizer of the run in `maxlm.data.compression`, which this package does not import.
_OWN = 'tokenizer'
_VALIDATION = 'validation data'


class CheckpointResults(NamedTuple):
    """Results of one checkpoint in the evaluation of a workdir.

    Attributes:
        name: name of the checkpoint.
        values: value of each metric, and half the width of its 95 % interval; None if that is unknown.
    """

    name: str
    values: dict[str, tuple[float, float | None]]

    def value(self, name: str) -> float | None:
        """Returns the value of a metric, or None."""
        return self.values[name][0] if name in self.values else None

    @property
    def core_rows(self) -> list[list[str]]:
        """Returns task, accuracy and centered accuracy of each task of CORE, and their mean as last row."""
        tasks = [name.split('/')[1] for name in self.values if name.startswith(f'{CORE}/') and name.endswith('/acc')]
        rows = [[task, *(self._cell(f'{CORE}/{task}/{kind}') for kind in ('acc', 'centered'))] for task in tasks]
        return [*rows, ['CORE (mean)', '', self._cell(CORE)]] if CORE in self.values else []

    @property
    def other_rows(self) -> list[list[str]]:
        """Returns metric and value of all other metrics."""
        return [[name, self._cell(name)] for name in self.values if name.split('/')[0] != CORE]

    def _cell(self, name: str) -> str:
        value, half = self.values.get(name, (None, None))
        if value is None:
            return DASH
        return f'{value:.4f}' if half is None else f'{value:.4f} ± {half:.4f}'


def evaluated(history: RunHistory) -> list[CheckpointResults]:
    """Returns the results in WORKDIR/evaluation by checkpoint, without values that are not finite."""
    found: dict[str, CheckpointResults] = {}
    for row in history.evaluation:
        for cell in items(row, 'checkpoints'):
            value, name = number(cell, 'value'), text(cell, 'checkpoint')
            low, high = (number({'bound': bound}, 'bound') for bound in [*items(cell, 'interval'), None, None][:2])
            half = None if low is None or high is None else (high - low) / 2
            if value is not None:
                found.setdefault(name, CheckpointResults(name, {})).values[text(row, 'name')] = value, half
    return list(found.values())


def evaluation_text(history: RunHistory) -> list[str]:
    """Returns a line for each evaluated checkpoint with CORE and the bits per byte of the validation data."""
    lines = []
    for one in evaluated(history):
        core, bits = one.value(CORE), one.value(BITS_PER_BYTE)
        parts = [] if core is None else [f'CORE {core:.4f}']
        parts += [] if bits is None else [f'{bits:.4f} validation bits per byte']
        lines += [f'{one.name}: {", ".join(parts)}'] if parts else []
    return lines


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


class PromptSamples(NamedTuple):
    """Samples of a prompt.

    Attributes:
        heading: end of the prompt, in one line.
        prompt: the prompt if the heading shows only a part of it or its lines, else ''.
        texts: step and text of the samples to show, newest first.
        num_samples: number of all samples.
    """

    heading: str
    prompt: str
    texts: list[tuple[float | None, str]]
    num_samples: int


def shown_samples(run: ReportedRun) -> tuple[list[PromptSamples], int]:
    """Returns the samples of each prompt, and the number of omitted prompts."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.history.samples:
        by_prompt.setdefault(text(line, 'prompt'), []).append(line)
    shown = []
    for prompt, lines in list(by_prompt.items())[:_MAX_PROMPTS]:
        newest_first = _evenly_spaced(lines)[::-1]
        lengths = (_MAX_NEWEST_CHARS, *[_MAX_CHARS] * (len(newest_first) - 1))
        texts = [
            (number(line, 'step'), shorten(text(line, 'text'), length))
            for line, length in zip(newest_first, lengths, strict=True)
        ]
        flat = ' '.join(prompt.split())
        heading = flat if len(flat) <= _MAX_HEADING_CHARS else f'… {flat[-_MAX_HEADING_CHARS:]}'
        whole = '' if heading == prompt else shorten(prompt, _MAX_NEWEST_CHARS)
        shown.append(PromptSamples(heading, whole, texts, len(lines)))
    return shown, len(by_prompt) - len(shown)


def tokenizer_table(runs: Sequence[ReportedRun]) -> list[list[str]]:
    """Returns the header and the rows of bytes per token by kind of text; [] if no run recorded them.

    The columns are the tokenizers of the runs, one for all runs with equal values, and the published tokenizers.
    """
    # Runs of earlier versions recorded no table.
    measured = [run for run in runs if run.compression]
    if not measured:
        return []
    newest = measured[-1].compression
    published = list(dict.fromkeys(name for kind in newest for name in mapping(newest, kind) if name != _OWN))
    columns: dict[tuple[str, ...], list[str]] = {}
    for run in measured:
        own = (_ratio(number(mapping(run.compression, kind), _OWN)) for kind in newest)
        columns.setdefault((*own, _ratio(run.bytes_per_token)), []).append(run.name)
    names = [', '.join(names) if len(runs) > 1 else 'this run' for names in columns.values()]
    rows = [
        [kind, *own, *(_ratio(number(mapping(newest, kind), name)) for name in published)]
        for kind, own in zip([*newest, _VALIDATION], zip(*columns, strict=True), strict=True)
    ]
    shown = [row for row in rows if {*row[1:]} != {DASH}]
    return [['', *names, *published], *shown] if shown else []


def _ratio(value: float | None) -> str:
    return DASH if value is None else f'{value:.2f}'


def shorten(text: str, length: int) -> str:
    """Returns a text of at most `length` characters, with an ellipsis if it is longer."""
    return text if len(text) <= length else f'{text[:length]} …'


def _evenly_spaced(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most _MAX_STEPS evenly spaced lines, including the first and the last."""
    if len(lines) <= _MAX_STEPS:
        return list(lines)
    return [lines[index * (len(lines) - 1) // (_MAX_STEPS - 1)] for index in range(_MAX_STEPS)]
