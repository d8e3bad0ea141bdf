"""Tests the data of line charts: points, ranges, marks and texts."""

import math

from maxlm.reporting.charts import PAGE_POINTS, Chart, Mark, Series, chart_data, lower_title
from maxlm.reporting.curves import MAX_POINTS

LINE = [(0.0, 1.0), (50.0, 2.0), (100.0, 4.0)]
WAVE = [(float(step), math.sin(step)) for step in range(5000)]


def data(*curves, num_charts=1, **settings):
    series = [one if isinstance(one, Series) else Series(f's{n}', one) for n, one in enumerate(curves)]
    return chart_data(Chart('Loss', 'nats', series, **settings), num_charts)


def test_a_curve_has_its_points_and_a_summary():
    (series,) = data(LINE)['series']
    assert series['points'] == [[0, 50, 100], [1.0, 2.0, 4.0]]
    # First, last, lowest and highest value.
    assert series['summary'] == ['1', '4', '1', '4']


def test_axis_is_logarithmic_for_large_ranges():
    values = [(float(step), 1000.0 if step == 5 else 1.0) for step in range(10)]
    assert data(values, scale='auto')['log']
    assert not data(LINE, scale='auto')['log']
    assert not data(values, scale='zero')['log']


def test_gaps_are_kept_and_reported():
    found = data([(0.0, 1.0), (1.0, None), (2.0, 3.0)])
    assert found['series'][0]['points'][1] == [1.0, None, 3.0]
    assert found['gaps'] == '1 value is not finite.'
    assert data(LINE)['gaps'] == ''
    # Over time, gaps are pauses.
    assert data([(0.0, 1.0), (1.0, None), (2.0, 3.0)], x='time')['gaps'] == ''


def test_a_chart_without_values_is_false():
    assert [bool(Chart('', '', [Series('a', points)])) for points in ([], [(0.0, None)], LINE)] == [False, False, True]
    assert len(data([], LINE)['series']) == 1
    # A single value is drawn as a dot.
    assert data([(3.0, 7.0)])['series'][0]['dots']


def test_only_many_points_are_downsampled_and_smoothed():
    (shown,) = data(Series('a', WAVE, smooth=True))['series']
    assert MAX_POINTS / 2 < len(shown['points'][0]) <= MAX_POINTS
    assert shown['smooth']
    assert not data(Series('a', WAVE[:99], smooth=True))['series'][0]['smooth']


def test_curves_and_charts_share_the_point_limit():
    def count(found):
        return sum(len(one['points'][0]) for one in found['series'])

    assert count(data(*[WAVE] * 20)) <= 2 * MAX_POINTS
    assert count(data(*[WAVE] * 20, num_charts=100)) <= PAGE_POINTS // 100 + 20 * 50
    assert count(data(*[WAVE] * 20, num_charts=100)) < count(data(*[WAVE] * 20))


def test_values_above_the_plot_are_counted():
    typical = [(float(step), 2 + step % 2 / 10) for step in range(200)]
    found = data([(0.0, 50.0), *typical], scale='loss')
    assert found['notes'] == ['1 of 201 values are above the plot.']
    assert 2.1 < found['top'] < 3
    assert data([(0.0, 50.0), *typical])['notes'] == data(typical, scale='loss')['notes'] == []


def test_marks():
    marks = [Mark(50, 'alert', 'spike'), *[Mark(70, 'restart', 'again')] * 3, Mark(900, 'change', 'outside')]
    found = data(LINE, marks=marks)
    assert [mark['text'] for mark in found['marks']] == ['spike', '3 × again']
    assert found['mark_kinds'] == ['alert', 'restart']


def test_colors_repeat_with_other_dashes():
    def style(color):
        (one,) = data(Series('a', LINE, color))['series']
        return one['color'], one['dash']

    assert [style(color) for color in (0, 5, 6, 18)] == [(0, 0), (5, 0), (0, 1), (0, 0)]


def test_titles_within_a_line():
    assert [lower_title(title) for title in ('Learning rate', 'MFU', 'CPU load', '')] == [
        *('learning rate', 'MFU', 'CPU load', '')
    ]
