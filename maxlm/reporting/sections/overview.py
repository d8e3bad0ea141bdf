"""Overview of a run in twelve tiles: model, data, duration, cost and problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maxlm.formatting import (
    DASH,
    format_bytes,
    format_dollars,
    format_duration,
    format_loss,
    format_percent,
    format_si,
    format_time,
)
from maxlm.reporting.drawing.html import Markup, join, note, table, tag
from maxlm.reporting.sections.run_summary import ReportedRun
from maxlm.storage.json_fields import mapping, number, text
from maxlm.telemetry.run_status import CRASHED, DIVERGED, STALLED

_BAD = (CRASHED, DIVERGED, STALLED)


class Tile(NamedTuple):
    """A tile: label, value and detail."""

    label: str
    value: str
    detail: str = ''


def summary(runs: Sequence[ReportedRun]) -> Markup:
    """Returns tiles for one run, or a table for several."""
    if len(runs) == 1:
        elements = [
            tag('div', tag('h3', tile.label), tag('b', tile.value), tag('span', tile.detail), class_='tile')
            for tile in make_tiles(runs[0])
        ]
        return tag('section', _warnings(runs), tag('div', *elements, class_='tiles'), id='summary')
    columns = [make_tiles(run) for run in runs]
    rows = [
        [
            row_tiles[0].label,
            *(join(tag('b', tile.value), tag('br'), tag('span', tile.detail, class_='unit')) for tile in row_tiles),
        ]
        for row_tiles in zip(*columns, strict=True)
    ]
    names = [join(tag('span', class_='key', style=f'background:var(--c{run.color % 6})'), run.name) for run in runs]
    wide = table(['', *names], rows, texts=tuple(range(len(runs) + 1)), class_='compare')
    return tag('section', _warnings(runs), wide, id='summary')


def make_tiles(run: ReportedRun) -> list[Tile]:
    """Returns the same tiles in the same order for every run, with a dash for unknown values."""
    return [
        # Failures are shown above the tiles.
        Tile('State', run.status.state, '' if run.status.state in _BAD else run.status.reason),
        _model(run),
        _data(run),
        _steps(run),
        _validation(run),
        _training(run),
        _time(run),
        _cost(run),
        _goodput(run),
        _throughput(run),
        _hardware(run),
        _memory(run),
    ]


def headline(run: ReportedRun) -> str:
    """Returns one sentence that describes the model and its data."""
    parameters = number(run.started, 'parameters')
    if not run.history.has_started:
        return 'No run has started.'
    subject = f'A model of {format_si(parameters)} parameters' if parameters else 'A model'
    sources = [name for name, _, _ in run.dataset if name]
    sources_text = f' trained on {_shortlist(sources)}' if sources else ''
    return f'{subject}{sources_text}.'


def _warnings(runs: Sequence[ReportedRun]) -> Markup:
    lines = []
    for run in runs:
        prefix = f'{run.name}: ' if len(runs) > 1 else ''
        if run.status.state in _BAD:
            why = f': {run.status.reason}' if run.status.reason else ''
            lines.append(f'{run.name} is {run.status.state}{why}')
        if run.overfitting:
            lines.append(prefix + run.overfitting.words)
    box = tag('div', *(tag('p', line) for line in lines), class_='box') if lines else Markup('')
    notes = [f'{run.name}: {words}' if len(runs) > 1 else words for run in runs for words in run.history.notes]
    return join(box, *(note(words) for words in notes))


def _model(run: ReportedRun) -> Tile:
    config, detail = run.history.config, ''
    if config is not None:
        model = config.model
        detail = f'{model.family}, {model.num_layers} layers × {model.dim}, vocabulary {model.vocab_size:,}'
    parameters = number(run.started, 'parameters')
    return Tile('Parameters', format_si(parameters), detail)


def _data(run: ReportedRun) -> Tile:
    tokens = [tokens for _, tokens, _ in run.dataset if tokens is not None]
    names = [name for name, _, _ in run.dataset if name]
    return Tile('Training tokens', format_si(sum(tokens)) if tokens else DASH, _shortlist(names))


def _steps(run: ReportedRun) -> Tile:
    if run.step is None:
        return Tile('Steps', DASH, f'of {run.num_steps:,} planned' if run.num_steps else '')
    words = []
    if run.tokens_per_step:
        words.append(f'{format_si(run.step * run.tokens_per_step)} tokens')
    epoch = run.last('train/epoch')
    if epoch is not None:
        words.append(f'{epoch:.3g} epochs')
    value = f'{run.step:,}' + (f' of {run.num_steps:,}' if run.num_steps and run.num_steps != run.step else '')
    return Tile('Steps', value, ', '.join(words))


def _validation(run: ReportedRun) -> Tile:
    if run.best is None:
        return Tile('Best validation loss', DASH, 'no evaluation yet')
    step, loss = run.best
    last = run.last('eval/loss')
    return Tile('Best validation loss', format_loss(loss), f'at step {step:,.0f}; last {format_loss(last)}')


def _training(run: ReportedRun) -> Tile:
    last = run.last('train/loss')
    skipped = run.last('train/skipped_steps') or 0
    words = [f'{skipped:,.0f} steps skipped'] if skipped else []
    lowest = run.last('train/best_loss')
    if lowest is not None:
        words.insert(0, f'lowest {format_loss(lowest)}')
    return Tile('Last training loss', format_loss(last), ', '.join(words))


def _time(run: ReportedRun) -> Tile:
    num_attempts = len(run.start_events)
    words = f'{num_attempts} {"attempt" if num_attempts == 1 else "attempts"}, ' if num_attempts else ''
    since = f'{words}since {format_time(run.start_time)}' if run.start_time else ''
    return Tile('Wall time', format_duration(run.wall_seconds), since)


def _cost(run: ReportedRun) -> Tile:
    price = number(run.started, 'price_per_hour')
    if price is None:
        return Tile('Cost', format_dollars(run.dollars), 'price unknown' if run.dollars is None else '')
    source = text(run.started, 'price_source')
    detail = f'{format_dollars(price)} per device-hour' + (f' ({source})' if source else '')
    return Tile('Cost', format_dollars(run.dollars), detail)


def _goodput(run: ReportedRun) -> Tile:
    return Tile(
        'Goodput',
        format_percent(run.goodput_log.fraction if run.goodput_log else None),
        'of the wall time in productive steps',
    )


def _throughput(run: ReportedRun) -> Tile:
    rate, mfu = run.median('perf/tokens_per_second'), run.median('perf/mfu')
    peak, source = number(run.started, 'peak_tflops'), text(run.started, 'peak_source')
    words = f'MFU {format_percent(mfu)}' if mfu is not None else ''
    if words and peak:
        words += f' of {peak:,.4g} TFLOP/s' + (f' ({source})' if source else '')
    return Tile('Tokens per second', format_si(rate), words)


def _hardware(run: ReportedRun) -> Tile:
    devices = mapping(run.started, 'devices')
    if not devices:
        return Tile('Hardware', DASH)
    processes = number(devices, 'processes') or 1
    words = [text(run.started, 'mesh')] + ([f'{processes:.0f} processes'] if processes > 1 else [])
    return Tile('Hardware', f'{run.num_devices} × {text(devices, "kind")}', ', '.join(filter(None, words)))


def _memory(run: ReportedRun) -> Tile:
    available = number(mapping(run.started, 'plan'), 'memory_available_bytes')
    detail = f'of {format_bytes(available)} available to a program' if available and run.memory_bytes else ''
    return Tile('Peak device memory', format_bytes(run.memory_bytes), detail)


def _shortlist(names: list[str]) -> str:
    shown = names[:4] + ([f'{len(names) - 4} more'] if len(names) > 4 else [])
    return ', '.join(shown)
