"""Plots curves with braille characters, which have 2 × 4 dots each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.text import Text

from maxlm.formatting import format_si
from maxlm.reporting.drawing.curves import Point, finite
from maxlm.reporting.drawing.scales import Scale, covering, without_outliers

# The bit of each dot of a character, by column and row: https://www.unicode.org/charts/PDF/U2800.pdf
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_MARK = '◆'


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

    The lowest and the highest of the points in one column of dots are connected, so that no spike is lost. Outliers,
    e.g. at the start of a run, are drawn at the upper edge.

    Args:
        curve: points in order of steps.
        width: width of a line in characters.
        height: number of lines, including the line with the steps.
        style: style of the curve.
        marks: points to draw on top of the curve.
        mark_style: style of the marks.
    """
    points, finite_marks = finite(curve), finite(marks)
    rows = height - 1
    if not points or rows < 1:
        return _centred('no values yet', width, height)
    scale = covering([*without_outliers([y for _, y in points]), *(y for _, y in finite_marks)], margin=0.02)
    y_labels = _axis_labels(scale, rows)
    columns = width - max(map(len, y_labels)) - 1
    if columns < 2:
        return _centred('', width, height)
    first, last = points[0][0], max(x for x, _ in (points[-1], *finite_marks))
    canvas = _Canvas(columns, rows, Scale(first, last if last > first else first + 1), scale)
    canvas.draw(curve)
    lines = []
    for row, label in enumerate(y_labels):
        lines.append(Text.assemble((f'{label:>{width - columns - 1}}┤', 'dim'), (canvas.row(row), style)))
    for x, y in finite_marks:
        column, row = canvas.cell(x, y)
        position = width - columns + column
        lines[row] = Text.assemble(lines[row][:position], (_MARK, mark_style), lines[row][position + 1 :])
    x_labels = format_si(first), format_si(last)
    gap = columns - sum(map(len, x_labels))
    x_axis = f'{x_labels[0]}{" " * gap}{x_labels[1]}' if gap > 0 else x_labels[1].rjust(columns)
    if len(x_axis) <= columns:
        lines.append(Text(' ' * (width - columns) + x_axis, style='dim'))
    else:
        lines.append(Text(' ' * width))
    return lines


def _axis_labels(scale: Scale, rows: int) -> list[str]:
    """Returns the label of each row: the highest and lowest value, and from 5 rows on also a middle value."""
    rows_with_label = sorted({0, rows // 2, rows - 1} if rows >= 5 else {0, rows - 1})
    values = [scale.high - (scale.high - scale.low) * (row + 0.5) / rows for row in rows_with_label]
    texts = dict(zip(rows_with_label, _rounded(values), strict=True))
    return [texts.get(row, '') for row in range(rows)]


def _rounded(values: list[float]) -> list[str]:
    """Formats values with one more digit than is needed to distinguish them."""
    largest = max(map(abs, values))
    if largest >= 1e4:
        return [format_si(value) for value in values]
    if 0 < largest < 1e-2:
        return [f'{value:.1e}' for value in values]
    steps = [abs(one - other) for one, other in itertools.pairwise(values)]
    digits = 1 - math.floor(math.log10(min(steps, default=largest) or 1.0))
    return [f'{value:.{max(digits, 0)}f}' for value in values]


def _centred(text: str, width: int, height: int) -> list[Text]:
    blank = [Text(' ' * width) for _ in range(height)]
    if height and len(text) <= width:
        blank[height // 2] = Text(text.center(width), style='dim')
    return blank


class _Canvas:
    """A grid of dots that curves are drawn on."""

    def __init__(self, columns: int, rows: int, x_scale: Scale, y_scale: Scale):
        self._x_scale, self._y_scale = x_scale, y_scale
        self._width, self._height = 2 * columns, 4 * rows
        self._bits = [[0] * columns for _ in range(rows)]

    def draw(self, curve: Sequence[Point]) -> None:
        """Draws a line through the points of a curve, with gaps at values that are not finite."""
        spans: dict[int, tuple[int, int, int, int]] = {}
        columns_after_gap: set[int] = set()
        gap = False
        for x, y in curve:
            if y is None:
                gap = True
                continue
            column, row = self._dot(x, y)
            if column in spans:
                first_row, low, high, _ = spans[column]
                spans[column] = first_row, min(low, row), max(high, row), row
            else:
                spans[column] = row, row, row, row
                if gap:
                    columns_after_gap.add(column)
            gap = False
        previous: tuple[int, int] | None = None
        for column, (first_row, low, high, last_row) in spans.items():
            self._set(column, low, high)
            if previous and column not in columns_after_gap:
                self._join(previous, (column, first_row))
            previous = column, last_row

    def row(self, row: int) -> str:
        return ''.join(chr(_BRAILLE + bits) if bits else ' ' for bits in self._bits[row])

    def cell(self, x: float, y: float) -> tuple[int, int]:
        """Returns the column and row of the character that contains a point."""
        column, row = self._dot(x, y)
        return column // 2, row // 4

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        column = round(self._x_scale.fraction(x) * (self._width - 1))
        row = round((1 - self._y_scale.fraction(y)) * (self._height - 1))
        return min(max(column, 0), self._width - 1), min(max(row, 0), self._height - 1)

    def _set(self, column: int, low: int, high: int) -> None:
        for row in range(low, high + 1):
            self._bits[row // 4][column // 2] |= _BITS[column % 2][row % 4]

    def _join(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Fills the columns between two points."""
        (first, before), (last, after) = start, end
        filled_row = before
        for column in range(first + 1, last + 1):
            row = round(before + (after - before) * (column - first) / (last - first))
            self._set(column, min(filled_row, row), max(filled_row, row))
            filled_row = row
