"""Tests line charts: positions in units of the data, and descriptions."""

import math
import re

import pytest

from maxlm.reporting.drawing.curves import MAX_POINTS
from maxlm.reporting.drawing.line_chart import Chart, Mark, Series, draw, lower_title

LINE = [(0.0, 1.0), (50.0, 2.0), (100.0, 4.0)]


def chart(*series, **settings):
    return draw(Chart('Loss', 'nats', [Series(f's{n}', points) for n, points in enumerate(series)], **settings))


def curves(figure):
    """Returns (matrix, points) of each curve with data for the pointer. The points of all segments are joined."""
    found = []
    for attributes in re.findall(r'<path ([^>]*data-series[^>]*)/>', figure):
        matrix = [float(number) for number in re.search(r'matrix\(([^)]*)\)', attributes)[1].split()]
        pieces = re.search(r' d="([^"]*)"|^d="([^"]*)"', attributes)
        text = pieces[1] or pieces[2]
        found.append((matrix, [tuple(map(float, pair)) for pair in re.findall(r'[ML](\S+?) ([^ML]+)', text)]))
    return found


def transform(matrix, point):
    a, b, c, d, e, f = matrix
    return a * point[0] + c * point[1] + e, b * point[0] + d * point[1] + f


def test_curve_contains_its_values_and_is_within_the_frame():
    ((matrix, points),) = curves(chart(LINE))
    assert points == LINE
    first, middle, last = (transform(matrix, point) for point in points)
    # The curve rises to the right. The y axis of SVG points down.
    assert middle[0] == pytest.approx(500)
    assert 0 < first[0] < middle[0] < last[0] < 1000
    assert 1000 > first[1] > middle[1] > last[1] > 0


def test_ticks_are_at_their_values():
    figure = chart(LINE, scale='zero')
    (matrix, _), *_ = curves(figure)
    y_axis = re.search(r'<div class="y".*?</div>', figure)[0]
    for top, label in re.findall(r'<span style="top:([\d.]+)%">([^<]+)</span>', y_axis):
        assert transform(matrix, (0, float(label)))[1] / 10 == pytest.approx(float(top), abs=0.02)
    x_axis = re.search(r'<div class="x".*?</div>', figure)[0]
    labels = re.findall(r'left:([\d.]+)%"[^>]*>([^<]+)<', x_axis)
    assert len(labels) >= 4
    for left, label in labels:
        assert transform(matrix, (float(label), 0))[0] / 10 == pytest.approx(float(left), abs=0.02)


def test_axis_is_logarithmic_for_large_ranges():
    values = [(float(step), 1000.0 if step == 5 else 1.0) for step in range(10)]
    figure = chart(values, scale='auto')
    assert 'data-log="1"' in figure
    assert 'nats, logarithmic' in figure
    ((_, points),) = curves(figure)
    assert points[5] == (5.0, math.log10(1000))
    assert 'data-log' not in chart(LINE, scale='auto')
    assert 'data-log' not in chart(values)


def test_gaps_break_the_curve_and_are_reported():
    figure = chart([(0.0, 1.0), (1.0, None), (2.0, 3.0)])
    assert 'd="M0 1M2 3"' in figure
    assert '1 value is not finite' in figure
    assert 'not finite' not in chart(LINE)


def test_empty_chart_has_no_figure():
    assert chart() == chart([]) == chart([(0.0, None)]) == ''
    # A single value is drawn as a dot.
    assert 'h0' in chart([(3.0, 7.0)])


def test_only_many_points_are_downsampled_and_smoothed():
    points = [(float(step), math.sin(step)) for step in range(5000)]
    figure = draw(Chart('Loss', '', [Series('a', points, smooth=True)]))
    ((_, shown),) = curves(figure)
    assert len(shown) <= MAX_POINTS
    assert 'class="raw c0 d0"' in figure
    assert 'class="raw' not in draw(Chart('Loss', '', [Series('a', points[:99], smooth=True)]))


def test_many_curves_share_the_point_limit():
    points = [(float(step), math.sin(step)) for step in range(5000)]
    figure = chart(*[points] * 20)
    assert sum(len(shown) for _, shown in curves(figure)) <= 6 * MAX_POINTS
    assert len(figure) < 200_000


def test_values_above_the_frame_are_counted():
    typical = [(float(step), 2 + step % 2 / 10) for step in range(200)]
    assert '1 of 201 values are above the plot' in chart([(0.0, 50.0), *typical], scale='loss')
    assert 'above the plot' not in chart([(0.0, 50.0), *typical])


def test_marks_shade_and_best():
    marks = [Mark(50, 'alert', 'spike <b>'), *[Mark(70, 'restart', 'again')] * 3, Mark(900, 'change', 'outside')]
    series = Series('a', LINE, best=50.0, dots=True)
    figure = draw(Chart('Loss', '', [series], marks=marks, shade=(50, 500)))
    assert '<title>spike &lt;b&gt;</title>' in figure
    assert '<title>3 × again</title>' in figure
    assert 'outside' not in figure
    assert 'class="best c0 d0"' in figure
    left, width = map(float, re.search(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', figure).groups())
    assert (left, left + width) == (500, 1000)


def test_names_are_escaped_and_the_figure_has_a_description():
    figure = draw(Chart('<i>', '&', [Series('<script>', LINE)]))
    assert '<script>' not in figure
    assert '<i>' not in figure
    label = re.search(r'aria-label="([^"]*)"', figure)[1]
    assert 'first 1, last 4, lowest 1, highest 4' in label


def test_titles_within_a_line():
    assert [lower_title(title) for title in ('Learning rate', 'MFU', 'CPU load', '')] == [
        *('learning rate', 'MFU', 'CPU load', '')
    ]
