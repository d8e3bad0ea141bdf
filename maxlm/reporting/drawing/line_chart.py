"""Draws line charts as SVG stretched to the available space, with labels in HTML that are not stretched.

Curves have the units of their data and are positioned by a transform, so the page's script reads the values themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from maxlm.formatting import format_number
from maxlm.reporting.drawing.curves import MAX_POINTS, Point, downsample, finite, smooth
from maxlm.reporting.drawing.html import Markup, join, tag
from maxlm.reporting.drawing.palette import curve_class
from maxlm.reporting.drawing.scales import Scale, covering, labels, ticks, time_labels, time_ticks, without_outliers

# Size of the SVG coordinate system, which is stretched to any width and height.
SIZE = 1000
# Maximum number of points of all curves of a chart. Charts with many curves have fewer points per curve.
_CHART_POINTS = 6 * MAX_POINTS
# Minimum number of points for a smoothed curve, and the fraction of the points that one mean covers.
_NOISY, _SMOOTHING = 100, 0.03
# An axis is logarithmic if the ratio of the largest value to the median exceeds this.
_LOG_RATIO = 30
_MAX_MARKS = 80
# Maximum number of points that are distinguishable as dots.
_MAX_DOTS = 60


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: name in the legend.
        points: points in order of x.
        color: index of the color, from 0; related curves share a color.
        dots: draw each point as a dot, if there are few.
        smooth: draw a smoothed curve on top, if there are many points.
        best: x of the point to mark.
        legend: text after the last value in the legend.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    dots: bool = False
    smooth: bool = False
    best: float | None = None
    legend: str = ''


MarkKind = Literal['alert', 'restart', 'change']


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical line that marks an event of the run."""

    x: float
    kind: MarkKind
    words: str


MARKS: dict[MarkKind, str] = {
    'alert': 'alert',
    'restart': 'restart or rollback',
    'change': 'change of length or context',
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line chart.

    Attributes:
        title, unit: title and unit of the values.
        series: curves. If no curve has a value, nothing is drawn.
        x: x-axis: steps, or seconds since the run started.
        marks: events on the same axis.
        shade: range (from, to) of x to shade.
        scale: `auto` is logarithmic if values differ much; `zero` includes 0; `loss` omits outliers.
        wide: use the full width of the page and a larger height.
    """

    title: str
    unit: str
    series: Sequence[Series]
    x: Literal['step', 'time'] = 'step'
    marks: Sequence[Mark] = ()
    shade: tuple[float, float] | None = None
    scale: Literal['linear', 'auto', 'zero', 'loss'] = 'linear'
    wide: bool = False


def draw(chart: Chart) -> Markup:
    """Draws the chart as a figure; '' if no curve has a value."""
    series = [one for one in chart.series if finite(one.points)]
    if not series:
        return Markup('')
    values = [y for one in series for _, y in finite(one.points)]
    y = _value_scale(chart.scale, values)
    x = _x_scale([position for one in series for position, _ in one.points])
    marks = _merge_marks([mark for mark in chart.marks if x.low <= mark.x <= x.high], x)
    num_above = sum(value > y.high for value in values)
    unit = ', '.join(word for word in (chart.unit, 'logarithmic' if y.log else '') if word)
    caption = tag('figcaption', chart.title, ' ', tag('span', unit, class_='unit'))
    footnotes = [tag('small', f'{num_above:,} of {len(values):,} values are above the plot.')] if num_above else []
    if gaps := sum(value is None for one in series for _, value in one.points if chart.x == 'step'):
        footnotes.append(
            tag('small', f'{gaps:,} {"value is" if gaps == 1 else "values are"} not finite.', class_='error')
        )
    classes = 'chart wide' if chart.wide else 'chart'
    return tag(
        'figure',
        caption,
        _legend(series, marks),
        _frame(chart, series, x, y, marks),
        join(*footnotes, by=' '),
        class_=classes,
    )


def lower_title(title: str) -> str:
    """Lowercases a title within a sentence: Learning rate → learning rate, but MFU and CPU are unchanged."""
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def _key(classes: str, dots: str = '') -> Markup:
    """Draws a short piece of a curve for the legend."""
    paths = [tag('path', d='M0 5h30', class_=classes)] + ([tag('path', d='M15 5h0', class_=dots)] if dots else [])
    return tag('svg', *paths, viewBox='0 0 30 10', aria_hidden='true')


def _value_scale(kind: str, values: list[float]) -> Scale:
    if kind == 'loss':
        return covering(without_outliers(values))
    above_zero = sorted(value for value in values if value > 0)
    differ = bool(above_zero) and above_zero[-1] > _LOG_RATIO * above_zero[len(above_zero) // 2]
    return covering(values, log=kind == 'auto' and differ, from_zero=kind == 'zero')


def _x_scale(positions: list[float]) -> Scale:
    low, high = min(positions), max(positions)
    if low <= 0.5 * high:
        # A run starts at 0, even if its first line is later.
        low = 0.0
    length = high - low or 1.0
    # Leave space for the dots at the ends.
    return Scale(low - 0.01 * length, high + 0.01 * length)


def _merge_marks(marks: list[Mark], x: Scale) -> list[Mark]:
    """Merges marks of one kind that would overlap."""
    groups: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.kind, int(x.fraction(mark.x) * _MAX_MARKS)), []).append(mark)
    return [
        group[0] if len(group) == 1 else Mark(group[0].x, group[0].kind, f'{len(group)} × {group[0].words}')
        for group in groups.values()
    ]


def _legend(series: Sequence[Series], marks: Sequence[Mark]) -> Markup:
    rows = []
    for number, one in enumerate(series):
        last = format_number(finite(one.points)[-1][1])
        value = tag('b', last, data_series=number)
        words = [' ', one.legend] if one.legend else []
        color = curve_class(one.color)
        rows.append(tag('li', _key(f'line {color}', f'dots {color}' if one.dots else ''), one.name, ' ', value, *words))
    kinds = [kind for kind in MARKS if any(mark.kind == kind for mark in marks)]
    rows += [tag('li', _key(f'mark {kind}'), MARKS[kind]) for kind in kinds]
    return tag('ul', *rows, class_='legend')


def _frame(chart: Chart, series: Sequence[Series], x: Scale, y: Scale, marks: Sequence[Mark]) -> Markup:
    y_values = ticks(y, 7 if chart.wide else 5)
    x_values = (
        time_ticks(x, 8 if chart.wide else 6) if chart.x == 'time' else _integers(ticks(x, 8 if chart.wide else 6))
    )
    y_words = labels(y_values)
    x_words = time_labels(x_values) if chart.x == 'time' else labels(x_values)
    grid = ''.join(f'M0 {_coordinate(1 - y.fraction(value))}h{SIZE}' for value in y_values)
    shapes = [tag('path', d=grid, class_='grid')] if grid else []
    if chart.shade:
        shapes.append(_shade(chart.shade, x))
    shapes += [
        tag(
            'path',
            tag('title', mark.words),
            d=f'M{_coordinate(x.fraction(mark.x))} 0v{SIZE}',
            class_=f'mark {mark.kind}',
        )
        for mark in marks
    ]
    limit = max(50, min(MAX_POINTS, _CHART_POINTS // len(series)))
    shapes += [_curve(number, one, x, y, limit) for number, one in enumerate(series)]
    plot = tag(
        'svg',
        *shapes,
        class_='plot',
        viewBox=f'0 0 {SIZE} {SIZE}',
        preserveAspectRatio='none',
        role='img',
        aria_label=_words(chart, series),
        tabindex='0',
        data_x=f'{x.low!r} {x.high!r}',
        data_kind=chart.x,
        data_log='1' if y.log else None,
    )
    y_labels = [
        tag('span', word, style=f'top:{100 * (1 - y.fraction(value)):.2f}%')
        for value, word in zip(y_values, y_words, strict=True)
    ]
    x_labels = [
        tag('span', word, style=f'left:{100 * x.fraction(value):.2f}%', class_=_edge(x.fraction(value), number))
        for number, (value, word) in enumerate(zip(x_values, x_words, strict=True))
    ]
    width = max(map(len, y_words), default=1)
    left = tag('div', *y_labels, class_='y', aria_hidden='true')
    below = tag('div', *x_labels, class_='x', aria_hidden='true')
    hover_text = tag('div', class_='hover')
    return tag('div', left, plot, below, hover_text, class_='frame', style=f'--y:{0.5 * width + 1.0:.1f}rem')


def _curve(number: int, one: Series, x: Scale, y: Scale, limit: int) -> Markup:
    scaled_points = [
        (position, None if value is None or (y.log and value <= 0) else y.transform(value))
        for position, value in one.points
    ]
    low, high = y.transformed_range
    x_factor, y_factor = SIZE / (x.high - x.low), SIZE / (high - low)
    transform = f'matrix({x_factor!r} 0 0 {-y_factor!r} {-x.low * x_factor!r} {SIZE + low * y_factor!r})'
    color = curve_class(one.color)
    shown = downsample(scaled_points, limit)
    line = _path(shown)
    if one.smooth and len(scaled_points) >= _NOISY:
        mean = downsample(smooth(scaled_points, round(len(scaled_points) * _SMOOTHING) | 1), limit // 3)
        # The hover script reads the values instead of their means.
        raw = tag('path', d=line, transform=transform, class_=f'raw {color}', data_series=number)
        return join(raw, tag('path', d=_path(mean), transform=transform, class_=f'line {color}'))
    drawn = [tag('path', d=line, transform=transform, class_=f'line {color}', data_series=number)]
    if (one.dots and len(shown) <= _MAX_DOTS) or len(finite(shown)) <= 2:
        drawn.append(tag('path', d=_dots(shown), transform=transform, class_=f'dots {color}'))
    if one.best is not None:
        ring = _dots([point for point in scaled_points if point[0] == one.best][:1])
        drawn.append(tag('path', d=ring, transform=transform, class_=f'best {color}') if ring else Markup(''))
    return join(*drawn)


def _path(points: Sequence[Point]) -> str:
    commands, gap = [], True
    for position, value in points:
        if value is not None:
            commands.append(f'{"M" if gap else "L"}{_format_x(position)} {value:.6g}')
        gap = value is None
    return ''.join(commands)


def _dots(points: Sequence[Point]) -> str:
    """Returns lines without length, whose round caps appear as dots that stretching does not distort."""
    return ''.join(f'M{_format_x(position)} {value:.6g}h0' for position, value in points if value is not None)


def _shade(span: tuple[float, float], x: Scale) -> Markup:
    left, right = (min(1.0, max(0.0, x.fraction(end))) for end in span)
    return tag('rect', x=_coordinate(left), y=0, width=_coordinate(right - left), height=SIZE, class_='shade')


def _edge(fraction: float, number: int) -> str | None:
    """Returns CSS classes that keep labels at the ends in the frame, and hide every second one on phones."""
    words = ['end' if fraction > 0.96 else 'start' if fraction < 0.02 else '', 'second' if number % 2 else '']
    return ' '.join(filter(None, words)) or None


def _words(chart: Chart, series: Sequence[Series]) -> str:
    """Describes the chart in text, for screen readers."""
    sentences = []
    for one in series:
        values = [value for _, value in finite(one.points)]
        sentences.append(
            f'{one.name}: first {format_number(values[0])}, last {format_number(values[-1])}, '
            f'lowest {format_number(min(values))}, highest {format_number(max(values))}'
        )
    return f'{chart.title} over {chart.x}. {"; ".join(sentences[:12])}'


def _integers(values: list[float]) -> list[float]:
    """Keeps integers, since there are no fractional steps."""
    return [value for value in values if value == int(value)]


def _coordinate(fraction: float) -> str:
    return f'{SIZE * fraction:.2f}'.rstrip('0').rstrip('.')


def _format_x(value: float) -> str:
    return f'{value:.0f}' if value == int(value) else f'{value:.3f}'
