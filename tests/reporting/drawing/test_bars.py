"""Tests stacked bars. The width of a segment is its share, and segments have a fixed order."""

import re

import pytest

from maxlm.reporting.drawing.bars import Bar, draw_bars, swatch

LABELS = {'step': 'steps', 'lost': 'lost', 'idle': 'idle'}


def widths(figure):
    boxes = re.findall(r'<path d="M([\d.]+) 0h([\d.]+)v20h-[\d.]+z" class="t-(\w+)">', figure)
    return [(name, float(left), float(width)) for left, width, name in boxes]


def test_widths_are_relative_to_the_longest_bar():
    bars = [Bar('total', {'idle': 1.0, 'step': 3.0, 'other': 5.0}), Bar('half', {'step': 4.5})]
    figure = draw_bars(bars, title='Time', labels={**LABELS, 'other': 'other'})
    assert widths(figure) == [
        ('step', 0, pytest.approx(333.33)),
        ('idle', pytest.approx(333.33), pytest.approx(111.11)),
        ('other', pytest.approx(444.44), pytest.approx(555.56)),
        ('step', 0, 500),
    ]
    assert '<title>steps: 33.3%</title>' in figure
    assert 'aria-label="half: steps 100%"' in figure
    # The legend lists drawn segments only.
    assert swatch('idle') in figure
    assert swatch('lost') not in figure


def test_lost_time_is_striped():
    assert 'class="stripe"' in draw_bars([Bar('a', {'lost': 1.0})], title='', labels=LABELS)
    assert 'class="stripe"' not in draw_bars([Bar('a', {'step': 1.0})], title='', labels=LABELS)


def test_empty_bars_have_no_figure():
    assert draw_bars([], title='', labels=LABELS) == draw_bars([Bar('a', {'step': 0.0})], title='', labels=LABELS) == ''
    assert 'empty' not in draw_bars([Bar('a', {'step': 1.0}), Bar('empty', {})], title='', labels=LABELS)
