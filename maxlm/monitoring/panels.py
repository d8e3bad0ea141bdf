"""Panels of a dashboard, each as lines of text of a given width."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from maxlm.formatting import (
    DASH,
    format_bytes,
    format_dollars,
    format_duration,
    format_loss,
    format_percent,
    format_rate,
    format_si,
)
from maxlm.monitoring.dashboard_data import Reading, RunSnapshot, devices_of
from maxlm.monitoring.layout import bar, columns, field, flow, plain, truncate
from maxlm.monitoring.plot import plot
from maxlm.storage.json_fields import items, number, text
from maxlm.telemetry.run_status import CRASHED, DIVERGED, FINISHED, PREEMPTED, RUNNING, STALLED, STARTING

STATES = {
    STARTING: 'bold blue',
    RUNNING: 'bold green',
    STALLED: 'bold yellow',
    PREEMPTED: 'bold yellow',
    CRASHED: 'bold red',
    DIVERGED: 'bold red',
    FINISHED: 'bold cyan',
}
# Category of time → label, character and color.
CATEGORIES = {
    'step': ('step', '█', 'green'),
    'rollout': ('rollout', '▇', 'green'),
    'reward_wait': ('reward wait', '◫', 'yellow'),
    'tool_wait': ('tool wait', '◨', 'yellow'),
    'evaluation': ('evaluation', '▓', 'cyan'),
    'checkpoint': ('checkpoint', '▒', 'blue'),
    'replay': ('replay', '▥', 'cyan'),
    'data_wait': ('data wait', '░', 'yellow'),
    'compile': ('compile', '▚', 'magenta'),
    'start': ('start', '▞', 'white'),
    'restore': ('restore', '▤', 'blue'),
    'lost': ('lost', '×', 'red'),
    'idle': ('idle', '·', 'dim'),
    'other': ('other', '▨', 'dim'),
}
# Minimum temperatures in °C of each color.
WARM, HOT = 75.0, 85.0
# Maximum number of lines for the reason of a state.
MAX_REASON_LINES = 3
# Older readings are marked as stale.
STALE_SECONDS = 120.0
EVENT_STYLES = {
    'failed': 'red',
    'diverged': 'red',
    'device': 'red',
    'rollback': 'red',
    'finished': 'cyan',
    'preempted': 'yellow',
    'started': 'green',
    'resumed': 'green',
}


def state(run: RunSnapshot) -> Text:
    """Returns the state as one colored word."""
    return Text(f'● {run.status.state}', style=STATES.get(run.status.state, 'dim'))


def header(run: RunSnapshot, width: int) -> list[Text]:
    """Returns name, state and reason, with the time of day at the right."""
    clock = Text(_clock(run.now), style='dim')
    parts = [Text(plain(run.name), style='bold'), state(run)]
    if run.attempt > 1:
        parts.append(Text(f'attempt {run.attempt}', style='dim'))
    lines = flow(parts, width, separator='  ')
    gap = width - lines[0].cell_len - clock.cell_len
    if gap >= 2:
        lines[0] = Text.assemble(lines[0], ' ' * gap, clock)
    if run.status.reason:
        style = STATES.get(run.status.state, 'dim')
        reason_lines = textwrap.wrap(plain(run.status.reason), width, max_lines=MAX_REASON_LINES, placeholder=' …')
        lines += [Text(line, style=style) for line in reason_lines]
    return lines


def progress(run: RunSnapshot, width: int) -> list[Text]:
    """Returns the progress bar, and time, cost and tokens, spent and remaining."""
    lines = []
    if run.num_steps:
        fraction = run.step / run.num_steps
        before = f'step {run.step:,} of {run.num_steps:,} '
        # Round down, so that 100 % means finished.
        after = f' {1000 * run.step // run.num_steps / 10:.1f}%'
        bar_width = width - len(before) - len(after)
        bars = [bar(fraction, bar_width, 'green' if run.is_active else 'cyan')] if bar_width > 3 else []
        lines += flow([Text(before, style='bold'), *bars, Text(after, style='bold')], width, separator='')
    elif run.step or run.latest:
        lines.append(field('step', f'{run.step:,}'))
    fields = []
    spent = [format_duration(run.seconds)] if run.seconds is not None else []
    spent += [format_dollars(run.dollars)] if run.dollars is not None else []
    if spent:
        fields.append(field('spent', ', '.join(spent)))
    if run.seconds_left:
        left = [format_duration(run.seconds_left)]
        left += [format_dollars(run.dollars_left)] if run.dollars_left else []
        fields.append(field('left', ', '.join(left)))
        if run.status.state == RUNNING:
            fields.append(field('ends', _time_of_day(run.now + run.seconds_left, run.now)))
    if run.tokens is not None:
        of = f' of {format_si(run.num_tokens)}' if run.num_tokens else ''
        fields.append(field('tokens', format_si(run.tokens) + of))
    epoch = run.latest.get('train/epoch')
    if epoch is not None:
        fields.append(field('epoch', f'{epoch:.2f}'))
    return lines + flow(fields, width)


def metric_fields(run: RunSnapshot, width: int) -> list[Text]:
    """Returns the latest loss, learning rate and throughput."""
    fields = [
        _metric(run, 'train/loss', 'loss', format_loss),
        _metric(run, 'train/best_loss', 'best', format_loss),
        _metric(run, 'eval/loss', 'validation', format_loss),
        _metric(run, 'train/learning_rate', 'lr', lambda value: f'{value:.2e}'),
        _metric(run, 'train/grad_norm', 'grad norm', lambda value: f'{value:.3f}'),
        _metric(run, 'perf/tokens_per_second', '', lambda value: f'{value:,.0f} tokens/s'),
        _metric(run, 'perf/step_time_seconds', '', lambda value: f'{_short_duration(value)}/step'),
        _metric(run, 'perf/mfu', 'MFU', format_percent),
        _metric(run, 'memory/peak_gib', 'memory', lambda value: f'{value:.1f} GiB'),
    ]
    skipped = run.latest.get('train/skipped_steps')
    if skipped:
        fields.append(field('skipped', f'{skipped:,.0f} steps', 'bold red'))
    return flow([one for one in fields if one], width)


def loss_plot(run: RunSnapshot, width: int, height: int) -> list[Text]:
    """Plots the training loss with validation losses as marks, below a title."""
    marks = run.curves['eval/loss']
    title = Text.assemble(('loss', 'cyan'), *([('  ◆ validation', 'yellow')] if marks else []), ('  by step', 'dim'))
    plot_lines = plot(run.curves['train/loss'], width=width, height=height - 1, marks=marks)
    return [title if title.cell_len <= width else Text('loss', style='cyan'), *plot_lines]


def small_plot(run: RunSnapshot, name: str, title: str, style: str, width: int, height: int) -> list[Text]:
    """Plots one metric below a title."""
    return [Text(title, style=style), *plot(run.curves[name], width=width, height=height - 1, style=style)]


def goodput(run: RunSnapshot, width: int, *, bars: bool) -> list[Text]:
    """Returns the time by category: one bar with a legend, or with `bars` one bar per category."""
    total = sum(run.seconds_by_category.values())
    if not total:
        return []
    categories = {**{name: (name, '?', 'dim') for name in run.seconds_by_category}, **CATEGORIES}
    ranked = sorted(run.seconds_by_category, key=lambda name: -run.seconds_by_category[name])
    fractions = {name: run.seconds_by_category[name] / total for name in ranked}
    if bars:
        label_width = max(len(categories[name][0]) for name in ranked)
        lines = []
        for name in ranked:
            label, _, style = categories[name]
            percent, seconds = (
                f' {format_percent(fractions[name]):>6}',
                f'  {format_duration(run.seconds_by_category[name]):>11}',
            )
            bar_width = width - label_width - 1 - len(percent) - len(seconds)
            elements = [bar(fractions[name], bar_width, style, full='█', rest=' ')] if bar_width > 3 else []
            parts = [Text(f'{label:<{label_width}} ', style='dim'), *elements, Text(percent), Text(seconds)]
            lines.append(flow(parts, width, separator='')[0])
        return lines
    stacked, filled = Text(), 0.0
    for name in ranked:
        filled += fractions[name]
        stacked.append(categories[name][1] * (round(filled * width) - len(stacked)), style=categories[name][2])
    legend = [
        Text.assemble(
            (categories[name][1], categories[name][2]), ' ', field(categories[name][0], format_percent(fractions[name]))
        )
        for name in ranked
        if fractions[name] >= 0.0005
    ]
    return [stacked, *flow(legend, width, separator='  ')]


def devices(run: RunSnapshot, width: int, *, max_lines: int) -> list[Text]:
    """Returns a line per accelerator and host; above `max_lines` lines, one line for all accelerators of a host."""
    hosts = len(run.readings)
    single = sum(len(devices_of(reading)) for reading in run.readings) + hosts <= max_lines
    lines: list[Text] = []
    rows = [
        [Text(_device_name(reading, device, hosts)), *_device_cells(device)]
        for reading in run.readings
        for device in devices_of(reading)
    ]
    if single:
        lines += columns(rows, width)
    else:
        for reading in run.readings:
            if host_devices := devices_of(reading):
                lines += flow(_summary(reading, host_devices, hosts), width)[:1]
    for reading in run.readings:
        lines.append(flow(_host(reading, hosts), width)[0])
    if len(lines) > max_lines > 0:
        hidden = len(lines) - max_lines + 1
        lines = [*lines[: max_lines - 1], truncate(f'and {hidden} more hosts', width, 'dim')]
    return lines


def events(run: RunSnapshot, width: int, height: int) -> list[Text]:
    """Returns the newest events, the newest last; alerts are colored."""
    lines = []
    for event in run.events[-height:] if height > 0 else []:
        kind = text(event, 'kind')
        style = EVENT_STYLES.get(kind, 'yellow' if event.get('alert') else '')
        time = number(event, 'time')
        when = '' if time is None else _time_of_day(time, run.now)
        step = number(event, 'step')
        message = text(event, 'message')
        location = f'step {step:,.0f}' if step is not None and not message.startswith('step ') else ''
        prefix = ' '.join(filter(None, [when, kind, location]))
        lines.append(truncate(f'{prefix}: {message}', width, style))
    return lines


def notes(run: RunSnapshot, width: int) -> list[Text]:
    """Returns problems with reading files."""
    return [truncate(note, width, 'yellow') for note in run.notes]


def _metric(run: RunSnapshot, name: str, label: str, write: Any) -> Text | None:
    if name not in run.latest:
        return None
    value = run.latest[name]
    if value is None:
        return field(label or name, 'not finite', 'bold red')
    shown = field(label, write(value))
    if name == 'eval/loss' and run.last_eval_step is not None:
        shown.append(f' at step {run.last_eval_step:,}', style='dim')
    return shown


def _device_name(reading: Reading, device: Mapping[str, Any], hosts: int) -> str:
    index = number(device, 'index')
    name = '' if index is None else f'{index:.0f}'
    return f'{plain(text(reading.line, "host"))}:{name}' if hosts > 1 else f'device {name}'


def _device_cells(device: Mapping[str, Any]) -> list[Text]:
    utilization, memory, total_memory = (
        number(device, key) for key in ('use_percent', 'memory_bytes', 'memory_total_bytes')
    )
    degrees, power, limit = (number(device, key) for key in ('temperature_c', 'power_w', 'power_limit_w'))
    clock, max_clock = (number(device, key) for key in ('clock_mhz', 'clock_max_mhz'))
    errors = number(device, 'ecc_errors')
    throttled = ' '.join(plain(str(reason)) for reason in items(device, 'throttled'))
    return [
        Text('' if utilization is None else f'{utilization:.0f}%', style='bold'),
        Text(_usage(memory, total_memory, 2**30, 'GiB', '.1f')),
        _degrees(degrees),
        Text(_usage(power, limit, 1, 'W', '.0f')),
        Text(f'throttled: {throttled}' if throttled else '', style='yellow'),
        Text(f'{errors:.0f} ECC errors' if errors else '', style='bold red'),
        Text(_usage(clock, max_clock, 1, 'MHz', '.0f')),
    ]


def _summary(reading: Reading, host_devices: Sequence[Mapping[str, Any]], hosts: int) -> list[Text]:
    """Summarizes the devices of one host in one line, problems first."""

    def values(key: str) -> list[float]:
        return [value for device in host_devices if (value := number(device, key)) is not None]

    host_prefix = f'{plain(text(reading.line, "host"))}: ' if hosts > 1 else ''
    fields = [Text(f'{host_prefix}{len(host_devices)} devices')]
    if throttled_devices := [device for device in host_devices if items(device, 'throttled')]:
        fields.append(Text(f'{len(throttled_devices)} throttled', style='yellow'))
    if errors := sum(values('ecc_errors')):
        fields.append(Text(f'{errors:.0f} ECC errors', style='bold red'))
    if utilization := values('use_percent'):
        fields.append(Text(f'{min(utilization):.0f}–{max(utilization):.0f}%', style='bold'))
    if memory := values('memory_bytes'):
        total = values('memory_total_bytes')
        fields.append(Text(_usage(max(memory), max(total, default=None), 2**30, 'GiB', '.1f')))
    if degrees := values('temperature_c'):
        fields.append(_degrees(max(degrees)))
    if power := values('power_w'):
        fields.append(Text(f'{sum(power):,.0f} W'))
    if clocks := values('clock_mhz'):
        fields.append(Text(f'{min(clocks):.0f}–{max(clocks):.0f} MHz'))
    return fields


def _host(reading: Reading, hosts: int) -> list[Text]:
    line = reading.line
    fields = [Text(plain(text(line, 'host')) or f'process {reading.process}')]
    if reading.age > STALE_SECONDS:
        fields.append(Text(f'{format_duration(reading.age)} ago', style='yellow'))
    if hosts > 1 and reading.fraction is not None:
        fields.append(field('in steps', format_percent(reading.fraction)))
    cpu, ram, total_ram = (number(line, key) for key in ('cpu_percent', 'ram_bytes', 'ram_total_bytes'))
    process_ram, disk = number(line, 'process_ram_bytes'), number(line, 'disk_free_bytes')
    sent, received = number(line, 'net_sent_bytes_per_second'), number(line, 'net_received_bytes_per_second')
    if cpu is not None:
        fields.append(field('cpu', f'{cpu:.0f}%'))
    if ram is not None:
        fields.append(field('ram', _usage(ram, total_ram, 2**30, 'GiB', '.1f')))
    if process_ram is not None:
        fields.append(field('process ram', format_bytes(process_ram)))
    if disk is not None:
        fields.append(field('disk free', format_bytes(disk)))
    if sent is not None and received is not None:
        fields.append(field('net', f'{format_rate(received)} in, {format_rate(sent)} out'))
    return fields


def _usage(value: float | None, total: float | None, unit: float, name: str, form: str) -> str:
    if value is None:
        return ''
    of = '' if total is None else f'/{total / unit:{form}}'
    return f'{value / unit:{form}}{of} {name}'


def _degrees(degrees: float | None) -> Text:
    if degrees is None:
        return Text()
    return Text(f'{degrees:.0f} °C', style='bold red' if degrees >= HOT else 'yellow' if degrees >= WARM else '')


def _short_duration(seconds: float) -> str:
    """Formats a duration that may be short: 12.3 ms, 1.25 s."""
    return f'{1000 * seconds:.3g} ms' if seconds < 0.9995 else format_duration(seconds)


def _clock(seconds: float) -> str:
    try:
        return f'{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}'
    except (ValueError, OverflowError, OSError):
        return DASH


def _time_of_day(seconds: float, now: float) -> str:
    """Formats the time of day, with the date if it is another day."""
    shown, today = _clock(seconds), _clock(now)
    return shown[11:] if shown[:10] == today[:10] and len(shown) > 11 else shown
