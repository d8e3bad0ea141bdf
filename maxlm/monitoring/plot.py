"""Plots curves on the terminal with plotext."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import plotext
from rich.color import Color
from rich.text import Text

from maxlm.formatting import format_si
from maxlm.reporting.curves import Point, downsample, finite, outlier_limit


def plot(
    curve: Sequence[Point],
    *,
    width: int,
    height: int,
    style: str = 'cyan',
    marks: Sequence[Point] = (),
    mark_style: str = 'yellow',
) -> list[Text]:
    """Returns the lines of a plot with axes: values on the left, the first and the last step at the bottom.

    Outliers, e.g. at the start of a run, are drawn at the upper edge.

    Args:
        curve: points in order of steps.
        width: width of a line in characters.
        height: number of lines, including the line with the steps.
        style: color of the curve.
        marks: points to draw on top of the curve.
        mark_style: color of the marks.
    """
    # More points than dots would only slow down the plot. The highest and lowest values are kept.
    shown = downsample(curve, 6 * max(width, 1))
    points, finite_marks = finite(shown), finite(marks)
    if not points or height < 2 or width < 12:
        message = '' if points else 'no values yet'
        return [
            Text((message if row == height // 2 and len(message) <= width else '').center(width), style='dim')
            for row in range(height)
        ]
    low, high = _value_range([y for _, y in points], [y for _, y in finite_marks])
    # Lines to points outside the axes would be slow, since plotext computes them completely.
    steps = [x for x, _ in (*points, *finite_marks)]
    first, last = min(steps), max(steps)
    plotext.clear_figure()
    plotext.theme('clear')
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    plotext.xaxes(False, False)
    plotext.yaxes(True, False)
    plotext.ylim(low, high)
    plotext.xlim(first, last if last > first else first + 1)
    for has_value, part in itertools.groupby(shown, lambda point: point[1] is not None):
        if has_value:
            xs, ys = zip(*finite(part), strict=True)
            plotext.plot(xs, [min(y, high) for y in ys], marker='braille', color=Color.parse(style).number)
    if finite_marks:
        plotext.scatter(*zip(*finite_marks, strict=True), marker='◆', color=Color.parse(mark_style).number)
    values = [low + (high - low) * fraction for fraction in ((0, 0.5, 1) if height > 5 else (0, 1))]
    plotext.yticks(values, _labels(values))
    plotext.xticks([first, last], [format_si(first), format_si(last)])
    return list(Text.from_ansi(plotext.build()).split('\n'))[:height]


def _value_range(values: Sequence[float], marked: Sequence[float]) -> tuple[float, float]:
    top = outlier_limit(values)
    low, high = min([*values, *marked]), max([max(values) if top is None else top, *marked])
    margin = 0.02 * (high - low) if high - low > 1e-9 * abs(high) else 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _labels(values: Sequence[float]) -> list[str]:
    """Formats values with one more digit than is needed to distinguish them."""
    largest = max(map(abs, values))
    if largest >= 1e4:
        return [format_si(value) for value in values]
    if 0 < largest < 1e-2:
        return [f'{value:.1e}' for value in values]
    digits = max(0, 1 - math.floor(math.log10(values[1] - values[0])))
    return [f'{value:.{digits}f}' for value in values]
