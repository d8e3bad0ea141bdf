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
from maxlm.reporting.records import BITS_PER_BYTE, CORE, evaluated
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
    status, started, devices = run.status, run.started, mapping(run.started, 'devices')
    # Failures are shown above the tiles.
    reason = '' if status.state in _BAD else status.reason
    tokens = [tokens for _, tokens, _ in run.dataset if tokens is not None]
    goodput = run.goodput_log.fraction if run.goodput_log else None
    memory = number(run.plan, 'memory_available_bytes')
    available = f'of {format_bytes(memory)} available to a program' if memory and run.memory_bytes else ''
    lowest, skipped = run.last('train/best_loss'), run.last('train/skipped_steps')
    lowest_loss = lowest is not None and f'lowest {format_loss(lowest)}'
    skipped_steps = skipped and f'{skipped:,.0f} steps skipped'
    count, rate = len(run.start_events), run.median('perf/tokens_per_second')
    attempts = count and f'{count} {"attempt" if count == 1 else "attempts"}'
    since = f'since {format_time(run.start_time)}' if run.start_time else ''
    price, price_source = number(started, 'price_per_hour'), _source(text(started, 'price_source'))
    price_words = f'{format_dollars(price)} per device-hour{price_source}' if price is not None else ''
    mfu, peak, peak_source = run.median('perf/mfu'), number(started, 'peak_tflops'), text(started, 'peak_source')
    of_peak = f' of {peak:,.4g} TFLOP/s{_source(peak_source)}' if peak else ''
    processes = number(devices, 'processes') or 1
    hardware = f'{run.num_devices} × {text(devices, "kind")}' if devices else DASH
    return [
        Tile('State', status.state, reason),
        Tile('Parameters', format_si(number(started, 'parameters')), _model(run)),
        Tile('Tokens trained', *_trained(run)),
        Tile('Tokens of training data', format_si(sum(tokens)) if tokens else DASH, _shortlist(run.source_names)),
        Tile('Steps', *_steps(run)),
        Tile('Best validation loss', *_best(run)),
        *_evaluation(run),
        Tile('Last training loss', format_loss(run.last('train/loss')), _list(lowest_loss, skipped_steps)),
        Tile('Wall time', format_duration(run.wall_seconds), _list(attempts, since) if since else ''),
        Tile('Cost', format_dollars(run.dollars), price_words or ('price unknown' if run.dollars is None else '')),
        Tile('Goodput', format_percent(goodput), 'of the wall time in productive steps'),
        Tile('Tokens per second', format_si(rate), f'MFU {format_percent(mfu)}{of_peak}' if mfu is not None else ''),
        Tile('Hardware', hardware, _list(text(started, 'mesh'), processes > 1 and f'{processes:.0f} processes')),
        Tile('Peak device memory', format_bytes(run.memory_bytes), available),
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
            lines.append((f'{run.name}: ' if len(runs) > 1 else '') + run.overfitting.summary)
    return lines


def _model(run: ReportedRun) -> str:
    if run.history.config is None:
        return ''
    model = run.history.config.model
    return f'{model.family}, {model.num_layers} layers × {model.dim}, vocabulary {model.vocab_size:,}'


def _steps(run: ReportedRun) -> tuple[str, str]:
    if run.step is None:
        return DASH, f'of {run.num_steps:,} planned' if run.num_steps else ''
    planned = f' of {run.num_steps:,}' if run.num_steps and run.num_steps != run.step else ''
    return f'{run.step:,}{planned}', ''


def _trained(run: ReportedRun) -> tuple[str, str]:
    epochs, tokens = run.last('train/epoch'), run.last('train/tokens')
    if tokens is None and run.step is not None and run.tokens_per_step:
        tokens = run.step * run.tokens_per_step
    return format_si(tokens), '' if epochs is None else f'{epochs:.3g} epochs'


def _best(run: ReportedRun) -> tuple[str, str]:
    if run.best is None:
        return DASH, 'no evaluation yet'
    step, loss = run.best
    bits = run.bits_per_byte(loss)
    per_byte = f' ({format_loss(bits)} bits per byte)' if bits is not None else ''
    return format_loss(loss), f'at step {step:,.0f}{per_byte}; last {format_loss(run.last("eval/loss"))}'


def _evaluation(run: ReportedRun) -> list[Tile]:
    """Returns the tiles of the evaluation of the workdir, from its last checkpoint with the value."""
    found = []
    for label, name in (('CORE', CORE), ('Validation bits per byte', BITS_PER_BYTE)):
        values = [(one.name, value) for one in evaluated(run.history) if (value := one.value(name)) is not None]
        checkpoint, value = values[-1] if values else ('', None)
        found.append(Tile(label, format_loss(value), checkpoint))
    return found


def _shortlist(names: list[str]) -> str:
    return ', '.join(names[:4] + ([f'{len(names) - 4} more'] if len(names) > 4 else []))


def _list(*values: object) -> str:
    return ', '.join(str(value) for value in values if value)


def _source(source: str) -> str:
    return f' ({source})' if source else ''
