"""Tests plots of curves: size, positions of points, spikes, gaps and marks."""

import math
import random
import re

import pytest
from rich.color import Color

from maxlm.monitoring.plot import plot


def texts(lines):
    return [line.plain for line in lines]


def dots(lines):
    """Returns (column, row) of all dots right of the axis, counted from the upper left."""
    found = set()
    bits = {(0, 0): 1, (0, 1): 2, (0, 2): 4, (0, 3): 64, (1, 0): 8, (1, 1): 16, (1, 2): 32, (1, 3): 128}
    for row, line in enumerate(texts(lines)[:-1]):
        for column, character in enumerate(re.split('[┤│]', line)[1]):
            code = ord(character) - 0x2800
            if 0 <= code < 256:
                found |= {(2 * column + x, 4 * row + y) for (x, y), bit in bits.items() if code & bit}
    return found


@pytest.mark.parametrize(('width', 'height'), [(80, 12), (20, 3), (200, 50), (11, 2), (40, 6)])
def test_plot_has_the_requested_size(width, height):
    for curve in ([], [(1, None)], [(1, 2.0)], [(x, math.sin(x / 9)) for x in range(500)], [(1, 1e9), (2, -1e9)]):
        lines = plot(curve, width=width, height=height, marks=curve[::50])
        assert [line.cell_len for line in lines] == [width] * height


def test_falling_curve_falls():
    found = dots(plot([(x, -x) for x in range(100)], width=46, height=11))
    columns = max(x for x, _ in found) + 1
    highest = [min(y for x, y in found if x == column) for column in range(columns)]
    assert highest == sorted(highest)
    assert highest[0] <= 2
    assert highest[-1] >= 36
    rising = dots(plot([(x, x) for x in range(100)], width=46, height=11))
    assert rising != found


def test_steps_are_labeled_below():
    lines = texts(plot([(10, 1.0), (12_345, 2.0)], width=30, height=6))
    assert lines[-1].split() == ['10', '12.3k']
    assert lines[-1].rstrip().endswith('12.3k')


def test_all_steps_are_within_the_axes():
    # A line to a point far outside the axes would take minutes.
    lines = texts(plot([(10, 1.0), (10**9, 2.0), (20, 3.0)], width=30, height=6))
    assert lines[-1].split() == ['10', '1B']


def test_values_are_labeled_with_enough_digits():
    def labels(values):
        lines = texts(plot(list(enumerate(values)), width=40, height=9))
        return [line.partition('┤')[0].strip() for line in lines[:-1] if '┤' in line]

    for values in ([0, 1], [2.0, 2.001], [1e-5, 3e-5], [1e6, 4e6], [-3, 3], [5, 5]):
        shown = labels(values)
        assert len(set(shown)) == len(shown) == 3


def test_spike_of_one_step_is_visible():
    flat = [(x, 1.0 + 0.1 * (x % 2)) for x in range(10_000)]
    spiked = [(x, 0.5 if x == 5001 else y) for x, y in flat]
    found = dots(plot(spiked, width=60, height=9))
    assert max(y for _, y in found) >= 30
    low = [x for x, y in found if y > 20]
    assert len(set(low)) <= 2


def test_first_losses_do_not_flatten_the_curve():
    rng = random.Random(0)
    curve = [(x, 50.0 if x < 3 else 2 + rng.random()) for x in range(1000)]
    found = dots(plot(curve, width=60, height=9))
    # Without the first three points, the remaining points use most of the height.
    later = [y for x, y in found if x > 20]
    assert max(later) - min(later) > 20


def test_nonfinite_values_are_gaps():
    values = [(x, None if 40 <= x < 60 else 1.0) for x in range(100)]
    columns = {x for x, _ in dots(plot(values, width=55, height=5))}
    gap = set(range(min(columns), max(columns))) - columns
    assert 15 <= len(gap) <= 25
    joined = {x for x, _ in dots(plot([(x, y) for x, y in values if y], width=55, height=5))}
    assert set(range(min(joined), max(joined))) - joined == set()


def test_marks_are_drawn_over_the_curve():
    lines = plot([(0, 0.0), (100, 1.0)], width=40, height=9, marks=[(50, 0.5), (100, 0.0), (60, None)])
    assert sum(text.count('◆') for text in texts(lines)) == 2
    (row,) = (row for row, text in enumerate(texts(lines)) if text.endswith('◆'))
    assert row == 7
    (span,) = (span for span in lines[row].spans if lines[row].plain[span.start : span.end] == '◆')
    assert span.style.color == Color.parse('color(3)')
