"""Cost of a run: accelerator time by use, storage of checkpoints, and transfer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from maxlm.formatting import GIB, format_bytes, format_dollars, format_duration
from maxlm.hardware.prices import STORAGE_SOURCE, storage_price
from maxlm.reporting.run_summary import ReportedRun
from maxlm.storage.json_fields import number, text
from maxlm.telemetry.goodput import CATEGORIES

# Uses of accelerator time, and their categories. Nobody pays for the time between attempts.
USES = {
    'training steps': ('step', 'rollout'),
    'evaluation': ('evaluation',),
    'saving and restoring checkpoints': ('checkpoint', 'restore'),
    'waiting for data': ('data_wait',),
    'waiting for rewards': ('reward_wait',),
    'waiting for tools or environments': ('tool_wait',),
    'computing steps again': ('replay',),
    'starting, compiling and other': ('start', 'compile', 'other'),
    'lost steps (repeated)': ('lost',),
}
PAID = tuple(category for category in CATEGORIES if category != 'idle')
UNKNOWN = 'unknown'
# Maximum time between two samples of the device statistics.
MAX_INTERVAL_SECONDS = 24 * 3600.0


def cost_rows(runs: Sequence[ReportedRun], several: bool) -> list[list[str]]:
    """Returns the name of each part of the cost, its amount and its cost; in one column per run for several runs."""
    columns = [_parts(run) for run in runs]
    # Uses without time, such as lost steps, are omitted.
    names = [name for name in columns[0] if any(parts[name][0] != format_duration(0) for parts in columns)]
    if not several:
        return [[name, *columns[0][name]] for name in names]
    return [[name, *('{1} ({0})'.format(*parts[name]) for parts in columns)] for name in names]


def price_note(run: ReportedRun) -> str:
    """Returns the sources of the prices, and what has no price."""
    attempts = run.goodput_log.attempts if run.goodput_log else []
    unpriced = sum(attempt.dollars is None for attempt in attempts)
    notes = []
    if attempts and unpriced == len(attempts):
        notes.append('The price of the devices is unknown; set train.price_per_hour.')
    elif attempts:
        source = text(run.started, 'price_source')
        notes.append(f'Price of the devices: {source}.' if source else '')
        notes.append(f'{unpriced} of {len(attempts)} attempts have no price and are not counted.' if unpriced else '')
    if run.history.stored and storage_price(_location(run)) is not None:
        notes.append(f'Price of storage: {STORAGE_SOURCE}.')
    return ' '.join(filter(None, notes))


def _parts(run: ReportedRun) -> dict[str, tuple[str, str]]:
    """Returns the amount and the dollars of each part of the cost."""
    attempts = run.goodput_log.attempts if run.goodput_log else []
    dollars = run.goodput_log.dollars_by_category if run.goodput_log else None
    parts = {}
    for name, categories in {**USES, 'accelerator time': PAID}.items():
        seconds = sum(attempt.seconds[category] for attempt in attempts for category in categories)
        price = None if dollars is None else format_dollars(sum(dollars[category] for category in categories))
        parts[name] = (format_duration(seconds) if attempts else UNKNOWN, price or UNKNOWN)
    amount, price, stored = UNKNOWN, None, run.history.stored
    if stored is not None:
        amount = f'{stored.num_checkpoints} × {format_bytes(stored.bytes / max(1, stored.num_checkpoints))}'
        monthly = storage_price(_location(run))
        price = None if monthly is None else f'{format_dollars(stored.bytes / GIB * monthly)} per month'
    return {**parts, 'storage of checkpoints': (amount, price or UNKNOWN), 'transfer': (_transfer(run), UNKNOWN)}


def _location(run: ReportedRun) -> str:
    """Returns the URL of the bucket that contains the checkpoints, or the local workdir."""
    config = run.history.config
    return (config.checkpoint.remote_dir if config else '') or run.history.workdir


def _transfer(run: ReportedRun) -> str:
    """Returns the network traffic of all hosts."""
    totals: dict[str, float] = {}
    for lines in run.history.devices.values():
        for before, line in itertools.pairwise(lines):
            start, stop = number(before, 'time'), number(line, 'time')
            # A rate covers the time since the previous line. The time between two attempts is not measured.
            if start is None or stop is None or number(before, 'life') != number(line, 'life'):
                continue
            for name in ('sent', 'received'):
                rate = number(line, f'net_{name}_bytes_per_second')
                # After longer intervals, the clock has been set.
                if rate is not None and 0 <= stop - start <= MAX_INTERVAL_SECONDS:
                    totals[name] = totals.get(name, 0.0) + rate * (stop - start)
    return ', '.join(f'{format_bytes(total)} {name}' for name, total in totals.items()) or UNKNOWN
