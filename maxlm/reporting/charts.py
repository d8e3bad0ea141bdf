"""Line charts as data for the page: the script of the page draws the curves, and a table summarizes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from maxlm.formatting import format_number
from maxlm.reporting.curves import MAX_POINTS, Point, downsample, finite, outlier_limit

# Maximum numbers of points of one chart and of all charts of a page, which keep a page below 2 MB.
_CHART_POINTS, PAGE_POINTS = 2 * MAX_POINTS, 80_000
# Minimum number of points of a curve that the page smooths.
_NOISY = 100
# An axis is logarithmic if the ratio of the largest value to the median exceeds this.
_LOG_RATIO = 30
_MAX_MARKS = 80
# Number of colors and of dash patterns in the style sheet. When all colors are used, they repeat with other dashes.
NUM_COLORS, NUM_DASHES = 6, 3

MarkKind = Literal['alert', 'restart', 'change']
MARKS: dict[MarkKind, str] = {
    'alert': 'alert',
    'restart': 'restart or rollback',
    'change': 'change of length or context',
}


class Mark(NamedTuple):
    """A vertical line that marks an event of the run."""

    x: float
    kind: MarkKind
    text: str


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: name in the legend.
        points: points in the order of the run.
        color: index of the color, from 0; related curves share a color.
        dots: draw each point as a dot.
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


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line chart.

    Attributes:
        title, unit: title and unit of the values.
        series: curves. A chart without values is not shown.
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
    scale: Literal['auto', 'zero', 'loss'] = 'auto'
    wide: bool = False

    def __bool__(self) -> bool:
        return any(finite(one.points) for one in self.series)


def chart_data(chart: Chart, num_charts: int = 1) -> dict[str, Any]:
    """Returns a chart with at least one value as JSON for the script, with texts for readers without it.

    Args:
        chart: the chart.
        num_charts: number of charts of the page, which share the limit on its points.
    """
    series = [one for one in chart.series if finite(one.points)]
    values = [y for one in series for _, y in finite(one.points)]
    limit = max(50, min(MAX_POINTS, min(_CHART_POINTS, PAGE_POINTS // num_charts) // len(series)))
    top = outlier_limit(values) if chart.scale == 'loss' else None
    notes = []
    if num_above := sum(value > top for value in values) if top is not None else 0:
        notes.append(f'{num_above:,} of {len(values):,} values are above the plot.')
    gaps = sum(value is None for one in series for _, value in one.points if chart.x == 'step')
    positions = [x for one in series for x, _ in one.points]
    marks = _merge_marks([mark for mark in chart.marks if mark.x <= max(positions)], max(positions))
    return {
        'title': chart.title,
        'unit': chart.unit,
        'x': chart.x,
        'wide': chart.wide,
        'log': chart.scale == 'auto' and _differ(values),
        'zero': chart.scale == 'zero',
        'top': top,
        'shade': chart.shade,
        'marks': [mark._asdict() for mark in marks],
        'mark_kinds': [kind for kind in MARKS if any(mark.kind == kind for mark in marks)],
        'notes': notes,
        'gaps': f'{gaps:,} {"value is" if gaps == 1 else "values are"} not finite.' if gaps else '',
        'series': [_series_data(one, limit) for one in series],
    }


def lower_title(title: str) -> str:
    """Lowercases a title within a sentence: Learning rate → learning rate, but MFU and CPU are unchanged."""
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def _series_data(one: Series, limit: int) -> dict[str, Any]:
    values = [y for _, y in finite(one.points)]
    rounds, color = divmod(one.color, NUM_COLORS)
    shown = downsample(one.points, limit)
    return {
        'name': one.name,
        'run': one.color,
        'color': color,
        'dash': rounds % NUM_DASHES,
        'dots': one.dots or len(values) <= 2,
        'smooth': one.smooth and len(one.points) >= _NOISY,
        'best': one.best,
        'legend': one.legend,
        'summary': [format_number(value) for value in (values[0], values[-1], min(values), max(values))],
        'points': [
            [int(x) if x == int(x) else round(x, 3) for x, _ in shown],
            [None if y is None else float(f'{y:.6g}') for _, y in shown],
        ],
    }


def _differ(values: Sequence[float]) -> bool:
    above_zero = sorted(value for value in values if value > 0)
    return bool(above_zero) and above_zero[-1] > _LOG_RATIO * above_zero[len(above_zero) // 2]


def _merge_marks(marks: Sequence[Mark], end: float) -> list[Mark]:
    """Merges marks of one kind that would overlap."""
    groups: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.kind, int(mark.x / (end or 1.0) * _MAX_MARKS)), []).append(mark)
    return [
        group[0] if len(group) == 1 else group[0]._replace(text=f'{len(group)} × {group[0].text}')
        for group in groups.values()
    ]
