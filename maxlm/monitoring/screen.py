"""Assembles the panels of a dashboard, for a screen of fixed size or for a page of any length."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from maxlm.formatting import DASH, format_dollars, format_duration, format_int, format_loss, format_percent
from maxlm.monitoring import panels
from maxlm.monitoring.dashboard_data import RunSnapshot
from maxlm.monitoring.layout import columns, fit, plain, truncate

# Minimum width for curves next to the other panels.
MIN_WIDE_WIDTH = 130
# Minimum height of a readable plot.
MIN_PLOT_HEIGHT = 5
# Heights on a page.
PAGE_PLOT, PAGE_EVENTS, PAGE_DEVICES = 14, 12, 64

TABLE = ('  run', 'state', 'done', 'loss', 'validation', 'left', 'cost', 'tokens/s')


def screen(runs: Sequence[RunSnapshot], selected: int, width: int, height: int, *, keys: str = '') -> list[Text]:
    """Returns exactly `height` lines of exactly `width` characters.

    Args:
        runs: all watched runs.
        selected: index of the run that is shown in detail.
        width: width in characters.
        height: number of lines.
        keys: description of the keys, for the last line.
    """
    top = table(runs, selected, width) if len(runs) > 1 else []
    bottom = [truncate(keys, width, 'dim')] if keys else []
    body_height = height - len(top) - len(bottom)
    run = runs[selected]
    body = _wide(run, width, body_height) if width >= MIN_WIDE_WIDTH else _narrow(run, width, body_height)
    body = [*body, *[Text()] * (body_height - len(body))][: max(body_height, 0)]
    return [fit(line, width) for line in [*top, *body, *bottom][:height]]


def page(run: RunSnapshot, width: int) -> list[Text]:
    """Returns all panels of one run, with any number of lines."""
    return [
        *_summary(run, width),
        *_plot_if_any(run, width, PAGE_PLOT),
        *_goodput(run, width),
        *_titled('devices', panels.devices(run, width, max_lines=PAGE_DEVICES), width),
        *_titled('events', panels.events(run, width, PAGE_EVENTS), width),
        *_titled('files', panels.notes(run, width), width),
    ]


def table(runs: Sequence[RunSnapshot], selected: int, width: int) -> list[Text]:
    """Returns a table with one line per run."""
    rows = [[Text(title, style='dim') for title in TABLE]]
    for number, run in enumerate(runs):
        mark = '▸' if number == selected else ' '
        done = format_percent(run.step / run.num_steps) if run.num_steps else DASH
        rows.append(
            [
                Text(f'{mark} {plain(run.name)[: width // 3]}', style='bold' if number == selected else ''),
                panels.state(run),
                Text(done),
                Text(format_loss(run.latest.get('train/loss'))),
                Text(format_loss(run.latest.get('eval/loss'))),
                Text(format_duration(run.seconds_left) if run.is_active else DASH),
                Text(format_dollars(run.dollars)),
                Text(format_int(run.latest.get('perf/tokens_per_second'))),
            ]
        )
    return [*columns(rows, width), _rule('', width)]


def _summary(run: RunSnapshot, width: int) -> list[Text]:
    return [*panels.header(run, width), *panels.progress(run, width), *panels.metric_fields(run, width)]


def _goodput(run: RunSnapshot, width: int) -> list[Text]:
    total = sum(run.seconds_by_category.values())
    if not total:
        return []
    title = f'time: {format_percent(run.seconds_by_category.get("step", 0.0) / total)} in productive steps'
    return _titled(title, panels.goodput(run, width, bars=True), width)


def _titled(title: str, lines: Sequence[Text], width: int) -> list[Text]:
    """Returns a title and the lines; empty if there are no lines."""
    return [_rule(title, width), *lines] if lines else []


def _plot_if_any(run: RunSnapshot, width: int, height: int) -> list[Text]:
    return panels.loss_plot(run, width, height) if run.curves['train/loss'] else []


def _narrow(run: RunSnapshot, width: int, height: int) -> list[Text]:
    """Arranges all panels in one column; if there is too little space, the plot is shortened first."""
    top = _summary(run, width)
    time = panels.goodput(run, width, bars=False)
    files = panels.notes(run, width)[:2]
    height_left = height - len(top) - len(time) - len(files)
    devices = panels.devices(run, width, max_lines=max(2, height_left // 3))
    height_left -= len(devices)
    has_loss = bool(run.curves['train/loss'])
    num_events = max(min(len(run.events), 3), height_left // 4 if has_loss else height_left)
    events = panels.events(run, width, min(num_events, max(height_left, 0)))
    height_left -= len(events)
    curve = _plot_if_any(run, width, height_left) if height_left >= MIN_PLOT_HEIGHT else []
    return [*top, *curve, *time, *devices, *events, *files]


def _wide(run: RunSnapshot, width: int, height: int) -> list[Text]:
    """Arranges curves on the left and all other panels on the right."""
    top = [*_summary(run, width), Text()]
    body_height = height - len(top)
    left_width = width * 11 // 20
    right_width = width - left_width - 3
    right = _right(run, right_width, body_height)
    left = _curves(run, left_width, body_height)
    body = []
    for row in range(max(body_height, 0)):
        left_line = left[row] if row < len(left) else Text()
        right_line = right[row] if row < len(right) else Text()
        body.append(Text.assemble(fit(left_line, left_width), ('   ', ''), fit(right_line, right_width)))
    return [*top, *body]


def _curves(run: RunSnapshot, width: int, height: int) -> list[Text]:
    if not run.curves['train/loss']:
        return []
    half = (width - 2) // 2
    small = height // 4 if height >= 24 else 0
    lines = panels.loss_plot(run, width, height - 2 * small) if height - 2 * small >= MIN_PLOT_HEIGHT else []
    if small:
        named = [
            ('train/grad_norm', 'gradient norm', 'magenta'),
            ('train/learning_rate', 'learning rate', 'blue'),
            ('perf/tokens_per_second', 'tokens/s', 'green'),
            ('eval/loss', 'validation loss', 'yellow'),
        ]
        plots = [panels.small_plot(run, name, title, style, half, small) for name, title, style in named]
        for one, other in zip(plots[::2], plots[1::2], strict=True):
            lines += [Text.assemble(fit(a, half), '  ', fit(b, half)) for a, b in zip(one, other, strict=True)]
    return lines


def _right(run: RunSnapshot, width: int, height: int) -> list[Text]:
    time = _goodput(run, width)
    files = _titled('files', panels.notes(run, width)[:4], width)
    height_left = height - len(time) - len(files)
    devices = _titled('devices', panels.devices(run, width, max_lines=max(2, height_left // 2)), width)
    height_left -= len(devices)
    events = _titled('events', panels.events(run, width, height_left - 1), width)
    return [*time, *devices, *events, *files]


def _rule(title: str, width: int) -> Text:
    if not title:
        return Text('─' * width, style='dim')
    text = truncate(title, max(width - 3, 1))
    return Text.assemble(('─ ', 'dim'), text, (' ' + '─' * (width - text.cell_len - 3), 'dim'))
