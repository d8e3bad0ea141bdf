"""The parts of a dashboard, each as lines of text of a given width."""

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
from maxlm.monitoring.braille_plot import plot
from maxlm.monitoring.dashboard_data import Facts, Reading, devices_of
from maxlm.monitoring.layout import bar, columns, field, flow, plain, shortened
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
# Where time goes: what is shown for it, and what it is drawn with; without colours the characters tell.
CATEGORIES = {
    'step': ('step', '█', 'green'),
    'rollout': ('rollout', '▇', 'green'),
    'evaluation': ('evaluation', '▓', 'cyan'),
    'checkpoint': ('checkpoint', '▒', 'blue'),
    'data_wait': ('data wait', '░', 'yellow'),
    'compile': ('compile', '▚', 'magenta'),
    'start': ('start', '▞', 'white'),
    'restore': ('restore', '▤', 'blue'),
    'lost': ('lost', '×', 'red'),
    'idle': ('idle', '·', 'dim'),
    'other': ('other', '▨', 'dim'),
}
# From where on a temperature, in °C, is coloured.
WARM, HOT = 75.0, 85.0
# That the reason of a state may take.
WHY_LINES = 3
# A reading that is older is said to be.
OLD_SECONDS = 120.0
EVENT_STYLES = {
    'failed': 'red',
    'diverged': 'red',
    'rollback': 'red',
    'finished': 'cyan',
    'preempted': 'yellow',
    'started': 'green',
    'resumed': 'green',
}


def state(facts: Facts) -> Text:
    """The state as one coloured word."""
    return Text(f'● {facts.condition.state}', style=STATES.get(facts.condition.state, 'dim'))


def header(facts: Facts, width: int) -> list[Text]:
    """Name, state and why, with the time of day at the right."""
    clock = Text(_clock(facts.now), style='dim')
    parts = [Text(plain(facts.name), style='bold'), state(facts)]
    if facts.life > 1:
        parts.append(Text(f'life {facts.life}', style='dim'))
    lines = flow(parts, width, between='  ')
    gap = width - lines[0].cell_len - clock.cell_len
    if gap >= 2:
        lines[0] = Text.assemble(lines[0], ' ' * gap, clock)
    if facts.condition.why:
        style = STATES.get(facts.condition.state, 'dim')
        why = textwrap.wrap(plain(facts.condition.why), width, max_lines=WHY_LINES, placeholder=' …')
        lines += [Text(line, style=style) for line in why]
    return lines


def progress(facts: Facts, width: int) -> list[Text]:
    """The bar of steps, and time, money and tokens, spent and left."""
    lines = []
    if facts.num_steps:
        share = facts.step / facts.num_steps
        before = f'step {facts.step:,} of {facts.num_steps:,} '
        # Only the end is 100 %.
        after = f' {1000 * facts.step // facts.num_steps / 10:.1f}%'
        room = width - len(before) - len(after)
        drawn = [bar(share, room, 'green' if facts.active else 'cyan')] if room > 3 else []
        lines += flow([Text(before, style='bold'), *drawn, Text(after, style='bold')], width, between='')
    elif facts.step or facts.newest:
        lines.append(field('step', f'{facts.step:,}'))
    fields = []
    spent = [format_duration(facts.seconds)] if facts.seconds is not None else []
    spent += [format_dollars(facts.dollars)] if facts.dollars is not None else []
    if spent:
        fields.append(field('spent', ', '.join(spent)))
    if facts.seconds_left:
        left = [format_duration(facts.seconds_left)]
        left += [format_dollars(facts.dollars_left)] if facts.dollars_left else []
        fields.append(field('left', ', '.join(left)))
        if facts.condition.state == RUNNING:
            fields.append(field('ends', _moment(facts.now + facts.seconds_left, facts.now)))
    if facts.tokens is not None:
        of = f' of {format_si(facts.num_tokens)}' if facts.num_tokens else ''
        fields.append(field('tokens', format_si(facts.tokens) + of))
    epoch = facts.newest.get('train/epoch')
    if epoch is not None:
        fields.append(field('epoch', f'{epoch:.2f}'))
    return lines + flow(fields, width)


def figures(facts: Facts, width: int) -> list[Text]:
    """Loss, rates and speed, as of the newest lines."""
    fields = [
        _metric(facts, 'train/loss', 'loss', format_loss),
        _metric(facts, 'train/best_loss', 'best', format_loss),
        _metric(facts, 'eval/loss', 'validation', format_loss),
        _metric(facts, 'train/learning_rate', 'lr', lambda value: f'{value:.2e}'),
        _metric(facts, 'train/grad_norm', 'grad norm', lambda value: f'{value:.3f}'),
        _metric(facts, 'perf/tokens_per_second', '', lambda value: f'{value:,.0f} tokens/s'),
        _metric(facts, 'perf/step_time_seconds', '', lambda value: f'{_brief(value)}/step'),
        _metric(facts, 'perf/mfu', 'MFU', format_percent),
        _metric(facts, 'memory/peak_gib', 'memory', lambda value: f'{value:.1f} GiB'),
    ]
    skipped = facts.newest.get('train/skipped_steps')
    if skipped:
        fields.append(field('left out', f'{skipped:,.0f} steps', 'bold red'))
    return flow([one for one in fields if one], width)


def loss_plot(facts: Facts, width: int, height: int) -> list[Text]:
    """Training loss with validation losses as marks, below a title."""
    marks = facts.curves['eval/loss']
    title = Text.assemble(('loss', 'cyan'), *([('  ◆ validation', 'yellow')] if marks else []), ('  by step', 'dim'))
    drawn = plot(facts.curves['train/loss'], width=width, height=height - 1, marks=marks)
    return [title if title.cell_len <= width else Text('loss', style='cyan'), *drawn]


def small_plot(facts: Facts, name: str, title: str, style: str, width: int, height: int) -> list[Text]:
    """One metric, below its title."""
    return [Text(title, style=style), *plot(facts.curves[name], width=width, height=height - 1, style=style)]


def goodput(facts: Facts, width: int, *, bars: bool) -> list[Text]:
    """Where the time went: one bar with a legend, or with `bars` one for each category."""
    total = sum(facts.shares.values())
    if not total:
        return []
    known = {**{name: (name, '?', 'dim') for name in facts.shares}, **CATEGORIES}
    ranked = sorted(facts.shares, key=lambda name: -facts.shares[name])
    share = {name: facts.shares[name] / total for name in ranked}
    if bars:
        words = max(len(known[name][0]) for name in ranked)
        lines = []
        for name in ranked:
            label, _, style = known[name]
            percent, seconds = (
                f' {format_percent(share[name]):>6}',
                f'  {format_duration(facts.shares[name]):>11}',
            )
            room = width - words - 1 - len(percent) - len(seconds)
            drawn = [bar(share[name], room, style, full='█', rest=' ')] if room > 3 else []
            parts = [Text(f'{label:<{words}} ', style='dim'), *drawn, Text(percent), Text(seconds)]
            lines.append(flow(parts, width, between='')[0])
        return lines
    stacked, reached = Text(), 0.0
    for name in ranked:
        reached += share[name]
        stacked.append(known[name][1] * (round(reached * width) - len(stacked)), style=known[name][2])
    legend = [
        Text.assemble((known[name][1], known[name][2]), ' ', field(known[name][0], format_percent(share[name])))
        for name in ranked
        if share[name] >= 0.0005
    ]
    return [stacked, *flow(legend, width, between='  ')]


def devices(facts: Facts, width: int, *, most: int) -> list[Text]:
    """A line for each accelerator and each host; with more than `most` lines, one for the accelerators of a host."""
    hosts = len(facts.readings)
    single = sum(len(devices_of(reading)) for reading in facts.readings) + hosts <= most
    lines: list[Text] = []
    rows = [
        [Text(_device_name(reading, device, hosts)), *_device_cells(device)]
        for reading in facts.readings
        for device in devices_of(reading)
    ]
    if single:
        lines += columns(rows, width)
    else:
        for reading in facts.readings:
            if found := devices_of(reading):
                lines += flow(_summary(reading, found, hosts), width)[:1]
    for reading in facts.readings:
        lines.append(flow(_host(reading, hosts), width)[0])
    if len(lines) > most > 0:
        hidden = len(lines) - most + 1
        lines = [*lines[: most - 1], shortened(f'and {hidden} more hosts', width, 'dim')]
    return lines


def events(facts: Facts, width: int, height: int) -> list[Text]:
    """The newest events, the newest last; those that are alerts are coloured."""
    lines = []
    for event in facts.events[-height:] if height > 0 else []:
        kind = text(event, 'kind')
        style = EVENT_STYLES.get(kind, 'yellow' if event.get('alert') else '')
        moment = number(event, 'time')
        when = '' if moment is None else _moment(moment, facts.now)
        step = number(event, 'step')
        message = text(event, 'message')
        where = f'step {step:,.0f}' if step is not None and not message.startswith('step ') else ''
        words = ' '.join(filter(None, [when, kind, where]))
        lines.append(shortened(f'{words}: {message}', width, style))
    return lines


def notes(facts: Facts, width: int) -> list[Text]:
    """What of the files could not be read."""
    return [shortened(note, width, 'yellow') for note in facts.notes]


def _metric(facts: Facts, name: str, label: str, write: Any) -> Text | None:
    if name not in facts.newest:
        return None
    value = facts.newest[name]
    if value is None:
        return field(label or name, 'not finite', 'bold red')
    shown = field(label, write(value))
    if name == 'eval/loss' and facts.evaluated_step is not None:
        shown.append(f' at step {facts.evaluated_step:,}', style='dim')
    return shown


def _device_name(reading: Reading, device: Mapping[str, Any], hosts: int) -> str:
    index = number(device, 'index')
    name = '' if index is None else f'{index:.0f}'
    return f'{plain(text(reading.line, "host"))}:{name}' if hosts > 1 else f'device {name}'


def _device_cells(device: Mapping[str, Any]) -> list[Text]:
    used, memory, of_memory = (number(device, key) for key in ('use_percent', 'memory_bytes', 'memory_total_bytes'))
    degrees, power, limit = (number(device, key) for key in ('temperature_c', 'power_w', 'power_limit_w'))
    clock, most_clock = (number(device, key) for key in ('clock_mhz', 'clock_max_mhz'))
    errors = number(device, 'ecc_errors')
    throttled = ' '.join(plain(str(reason)) for reason in items(device, 'throttled'))
    return [
        Text('' if used is None else f'{used:.0f}%', style='bold'),
        Text(_of(memory, of_memory, 2**30, 'GiB', '.1f')),
        _degrees(degrees),
        Text(_of(power, limit, 1, 'W', '.0f')),
        Text(f'slowed: {throttled}' if throttled else '', style='yellow'),
        Text(f'{errors:.0f} ECC errors' if errors else '', style='bold red'),
        Text(_of(clock, most_clock, 1, 'MHz', '.0f')),
    ]


def _summary(reading: Reading, found: Sequence[Mapping[str, Any]], hosts: int) -> list[Text]:
    """The devices of one host in one line, what is wrong with any of them first."""

    def values(key: str) -> list[float]:
        return [value for device in found if (value := number(device, key)) is not None]

    where = f'{plain(text(reading.line, "host"))}: ' if hosts > 1 else ''
    fields = [Text(f'{where}{len(found)} devices')]
    if slowed := [device for device in found if items(device, 'throttled')]:
        fields.append(Text(f'{len(slowed)} slowed', style='yellow'))
    if errors := sum(values('ecc_errors')):
        fields.append(Text(f'{errors:.0f} ECC errors', style='bold red'))
    if used := values('use_percent'):
        fields.append(Text(f'{min(used):.0f}–{max(used):.0f}%', style='bold'))
    if memory := values('memory_bytes'):
        total = values('memory_total_bytes')
        fields.append(Text(_of(max(memory), max(total, default=None), 2**30, 'GiB', '.1f')))
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
    if reading.age > OLD_SECONDS:
        fields.append(Text(f'{format_duration(reading.age)} ago', style='yellow'))
    if hosts > 1 and reading.share is not None:
        fields.append(field('in steps', format_percent(reading.share)))
    cpu, ram, of_ram = (number(line, key) for key in ('cpu_percent', 'ram_bytes', 'ram_total_bytes'))
    mine, disk = number(line, 'process_ram_bytes'), number(line, 'disk_free_bytes')
    sent, received = number(line, 'net_sent_bytes_per_second'), number(line, 'net_received_bytes_per_second')
    if cpu is not None:
        fields.append(field('cpu', f'{cpu:.0f}%'))
    if ram is not None:
        fields.append(field('ram', _of(ram, of_ram, 2**30, 'GiB', '.1f')))
    if mine is not None:
        fields.append(field('of it the run', format_bytes(mine)))
    if disk is not None:
        fields.append(field('disk free', format_bytes(disk)))
    if sent is not None and received is not None:
        fields.append(field('net', f'{format_rate(received)} in, {format_rate(sent)} out'))
    return fields


def _of(value: float | None, total: float | None, unit: float, name: str, form: str) -> str:
    if value is None:
        return ''
    of = '' if total is None else f'/{total / unit:{form}}'
    return f'{value / unit:{form}}{of} {name}'


def _degrees(degrees: float | None) -> Text:
    if degrees is None:
        return Text()
    return Text(f'{degrees:.0f} °C', style='bold red' if degrees >= HOT else 'yellow' if degrees >= WARM else '')


def _brief(seconds: float) -> str:
    """Of what may be short: 12.3 ms, 1.25 s."""
    return f'{1000 * seconds:.3g} ms' if seconds < 0.9995 else format_duration(seconds)


def _clock(seconds: float) -> str:
    try:
        return f'{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}'
    except (ValueError, OverflowError, OSError):
        return DASH


def _moment(seconds: float, now: float) -> str:
    """The time of day, with the date where it is another day."""
    shown, today = _clock(seconds), _clock(now)
    return shown[11:] if shown[:10] == today[:10] and len(shown) > 11 else shown
