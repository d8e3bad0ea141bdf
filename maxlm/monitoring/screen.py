"""Puts the parts of a dashboard together, for a screen of any size or for a page as long as it needs to be."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from maxlm.formatting import DASH, format_dollars, format_duration, format_int, format_loss, format_percent
from maxlm.monitoring import panels
from maxlm.monitoring.dashboard_data import Facts
from maxlm.monitoring.layout import columns, fitted, plain, shortened

# From this width on curves stand beside the rest.
WIDE = 130
# A plot that is lower says nothing.
LOWEST_PLOT = 5
# On a page.
PAGE_PLOT, PAGE_EVENTS, PAGE_DEVICES = 14, 12, 64

TABLE = ('  run', 'state', 'done', 'loss', 'validation', 'left', 'cost', 'tokens/s')


def screen(runs: Sequence[Facts], selected: int, width: int, height: int, *, keys: str = '') -> list[Text]:
    """Exactly `height` lines of exactly `width` characters.

    Args:
        runs: all that are watched.
        selected: the one that is shown whole.
        width: in characters.
        height: in lines.
        keys: what can be pressed, for the last line.
    """
    top = table(runs, selected, width) if len(runs) > 1 else []
    bottom = [shortened(keys, width, 'dim')] if keys else []
    room = height - len(top) - len(bottom)
    facts = runs[selected]
    body = _wide(facts, width, room) if width >= WIDE else _narrow(facts, width, room)
    body = [*body, *[Text()] * (room - len(body))][: max(room, 0)]
    return [fitted(line, width) for line in [*top, *body, *bottom][:height]]


def page(facts: Facts, width: int) -> list[Text]:
    """One run, whole, as long as it needs to be."""
    return [
        *_summary(facts, width),
        *_plot_if_any(facts, width, PAGE_PLOT),
        *_time(facts, width),
        *_part('devices', panels.devices(facts, width, most=PAGE_DEVICES), width),
        *_part('events', panels.events(facts, width, PAGE_EVENTS), width),
        *_part('files', panels.notes(facts, width), width),
    ]


def table(runs: Sequence[Facts], selected: int, width: int) -> list[Text]:
    """A line for each run."""
    rows = [
        [
            Text(word, style='dim')
            for word in ('  run', 'state', 'done', 'loss', 'validation', 'left', 'cost', 'tokens/s')
        ]
    ]
    for number, facts in enumerate(runs):
        mark = '▸' if number == selected else ' '
        done = format_percent(facts.step / facts.num_steps) if facts.num_steps else DASH
        rows.append(
            [
                Text(f'{mark} {plain(facts.name)[: width // 3]}', style='bold' if number == selected else ''),
                panels.state(facts),
                Text(done),
                Text(format_loss(facts.newest.get('train/loss'))),
                Text(format_loss(facts.newest.get('eval/loss'))),
                Text(format_duration(facts.seconds_left) if facts.active else DASH),
                Text(format_dollars(facts.dollars)),
                Text(format_int(facts.newest.get('perf/tokens_per_second'))),
            ]
        )
    return [*columns(rows, width), _rule('', width)]


def _summary(facts: Facts, width: int) -> list[Text]:
    return [*panels.header(facts, width), *panels.progress(facts, width), *panels.figures(facts, width)]


def _time(facts: Facts, width: int) -> list[Text]:
    total = sum(facts.shares.values())
    if not total:
        return []
    title = f'time: {format_percent(facts.shares.get("step", 0.0) / total)} in steps that count'
    return _part(title, panels.goodput(facts, width, bars=True), width)


def _part(title: str, lines: Sequence[Text], width: int) -> list[Text]:
    """Lines below a title; nothing where there are none."""
    return [_rule(title, width), *lines] if lines else []


def _plot_if_any(facts: Facts, width: int, height: int) -> list[Text]:
    return panels.loss_plot(facts, width, height) if facts.curves['train/loss'] else []


def _narrow(facts: Facts, width: int, height: int) -> list[Text]:
    """All parts one below the other; what there is no room for becomes shorter, the plot first."""
    top = _summary(facts, width)
    time = panels.goodput(facts, width, bars=False)
    files = panels.notes(facts, width)[:2]
    room = height - len(top) - len(time) - len(files)
    devices = panels.devices(facts, width, most=max(2, room // 3))
    room -= len(devices)
    drawn = bool(facts.curves['train/loss'])
    num_events = max(min(len(facts.events), 3), room // 4 if drawn else room)
    events = panels.events(facts, width, min(num_events, max(room, 0)))
    room -= len(events)
    curve = _plot_if_any(facts, width, room) if room >= LOWEST_PLOT else []
    return [*top, *curve, *time, *devices, *events, *files]


def _wide(facts: Facts, width: int, height: int) -> list[Text]:
    """Curves on the left, the rest on the right."""
    top = [*_summary(facts, width), Text()]
    room = height - len(top)
    left_width = width * 11 // 20
    right_width = width - left_width - 3
    right = _right(facts, right_width, room)
    left = _curves(facts, left_width, room)
    body = []
    for row in range(max(room, 0)):
        one = left[row] if row < len(left) else Text()
        other = right[row] if row < len(right) else Text()
        body.append(Text.assemble(fitted(one, left_width), ('   ', ''), fitted(other, right_width)))
    return [*top, *body]


def _curves(facts: Facts, width: int, height: int) -> list[Text]:
    if not facts.curves['train/loss']:
        return []
    half = (width - 2) // 2
    small = height // 4 if height >= 24 else 0
    lines = panels.loss_plot(facts, width, height - 2 * small) if height - 2 * small >= LOWEST_PLOT else []
    if small:
        named = [
            ('train/grad_norm', 'gradient norm', 'magenta'),
            ('train/learning_rate', 'learning rate', 'blue'),
            ('perf/tokens_per_second', 'tokens/s', 'green'),
            ('eval/loss', 'validation loss', 'yellow'),
        ]
        plots = [panels.small_plot(facts, name, title, style, half, small) for name, title, style in named]
        for one, other in zip(plots[::2], plots[1::2], strict=True):
            lines += [Text.assemble(fitted(a, half), '  ', fitted(b, half)) for a, b in zip(one, other, strict=True)]
    return lines


def _right(facts: Facts, width: int, height: int) -> list[Text]:
    time = _time(facts, width)
    files = _part('files', panels.notes(facts, width)[:4], width)
    room = height - len(time) - len(files)
    devices = _part('devices', panels.devices(facts, width, most=max(2, room // 2)), width)
    room -= len(devices)
    events = _part('events', panels.events(facts, width, room - 1), width)
    return [*time, *devices, *events, *files]


def _rule(title: str, width: int) -> Text:
    if not title:
        return Text('─' * width, style='dim')
    words = shortened(title, max(width - 3, 1))
    return Text.assemble(('─ ', 'dim'), words, (' ' + '─' * (width - words.cell_len - 3), 'dim'))
