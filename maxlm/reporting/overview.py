"""Overview of a run in tiles: model, data, duration, cost and problems."""

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
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import mapping, number, text
from maxlm.telemetry.run_status import CRASHED, DIVERGED, STALLED

_BAD = (CRASHED, DIVERGED, STALLED)


class Tile(NamedTuple):
    """A tile: label, value and detail."""

    label: str
    value: str
    detail: str = ''


def tiles(run: ReportedRun) -> list[Tile]:
    """Returns the same tiles in the same order for every run, with a dash for unknown values."""
    status, config, started = run.status, run.history.config, run.started
    tokens = [tokens for _, tokens, _ in run.dataset if tokens is not None]
    goodput, devices = run.goodput_log.fraction if run.goodput_log else None, mapping(started, 'devices')
    num_processes, memory = number(devices, 'processes') or 1, number(run.plan, 'memory_available_bytes')
    num_attempts = len(run.start_events)
    attempts = f'{num_attempts} {"attempt" if num_attempts == 1 else "attempts"}' if num_attempts else ''
    best_step, best_loss = run.best or (None, None)
    epoch, skipped, lowest = (run.last(f'train/{name}') for name in ('epoch', 'skipped_steps', 'best_loss'))
    rate, mfu, peak = run.median('perf/tokens_per_second'), run.median('perf/mfu'), number(started, 'peak_tflops')
    price = number(started, 'price_per_hour')
    model = config and f'{config.model.family}, {config.model.num_layers} layers × {config.model.dim}'
    planned = f' of {run.num_steps:,}' if run.num_steps and run.num_steps != run.step else ''
    return [
        # Failures are shown above the tiles.
        Tile('State', status.state, '' if status.state in _BAD else status.reason),
        Tile(
            'Parameters',
            format_si(number(started, 'parameters')),
            f'{model}, vocabulary {config.model.vocab_size:,}' if config else '',
        ),
        Tile('Training tokens', format_si(sum(tokens)) if tokens else DASH, _shortlist(run.source_names)),
        Tile(
            'Steps',
            DASH if run.step is None else f'{run.step:,}{planned}',
            (f'of {run.num_steps:,} planned' if run.num_steps else '')
            if run.step is None
            else _list(
                run.tokens_per_step and f'{format_si(run.step * run.tokens_per_step)} tokens',
                epoch is not None and f'{epoch:.3g} epochs',
            ),
        ),
        Tile(
            'Best validation loss',
            format_loss(best_loss),
            f'at step {best_step:,.0f}; last {format_loss(run.last("eval/loss"))}'
            if best_step is not None
            else 'no evaluation yet',
        ),
        Tile(
            'Last training loss',
            format_loss(run.last('train/loss')),
            _list(lowest is not None and f'lowest {format_loss(lowest)}', skipped and f'{skipped:,.0f} steps skipped'),
        ),
        Tile(
            'Wall time',
            format_duration(run.wall_seconds),
            _list(attempts, f'since {format_time(run.start_time)}') if run.start_time else '',
        ),
        Tile(
            'Cost',
            format_dollars(run.dollars),
            ('price unknown' if run.dollars is None else '')
            if price is None
            else f'{format_dollars(price)} per device-hour{_source(text(started, "price_source"))}',
        ),
        Tile('Goodput', format_percent(goodput), 'of the wall time in productive steps'),
        Tile(
            'Tokens per second',
            format_si(rate),
            f'MFU {format_percent(mfu)}'
            + (f' of {peak:,.4g} TFLOP/s{_source(text(started, "peak_source"))}' if peak else '')
            if mfu is not None
            else '',
        ),
        Tile(
            'Hardware',
            f'{run.num_devices} × {text(devices, "kind")}' if devices else DASH,
            _list(text(started, 'mesh'), num_processes > 1 and f'{num_processes:.0f} processes') if devices else '',
        ),
        Tile(
            'Peak device memory',
            format_bytes(run.memory_bytes),
            f'of {format_bytes(memory)} available to a program' if memory and run.memory_bytes else '',
        ),
    ]


def tile_rows(runs: Sequence[ReportedRun]) -> list[tuple[Tile, ...]]:
    """Returns the tiles of all runs by label, without those that are unknown for every run."""
    rows = zip(*map(tiles, runs), strict=True)
    return [row for row in rows if any(tile.value != DASH for tile in row)]


def headline(run: ReportedRun) -> str:
    """Returns one sentence that describes the model and its data."""
    parameters = number(run.started, 'parameters')
    if not run.history.has_started:
        return 'No run has started.'
    subject = f'A model of {format_si(parameters)} parameters' if parameters else 'A model'
    return f'{subject}{f" trained on {_shortlist(run.source_names)}" if run.source_names else ""}.'


def problems(runs: Sequence[ReportedRun]) -> list[str]:
    """Returns one sentence for each failure and for overfitting."""
    lines = []
    for run in runs:
        if run.status.state in _BAD:
            lines.append(f'{run.name} is {run.status.state}{f": {run.status.reason}" if run.status.reason else ""}')
        if run.overfitting:
            lines.append((f'{run.name}: ' if len(runs) > 1 else '') + run.overfitting.words)
    return lines


def _shortlist(names: list[str]) -> str:
    return ', '.join(names[:4] + ([f'{len(names) - 4} more'] if len(names) > 4 else []))


def _list(*words: object) -> str:
    return ', '.join(str(word) for word in words if word)


def _source(source: str) -> str:
    return f' ({source})' if source else ''
