"""Tests curves: extraction from lines, downsampling and gaps."""

import random

import pytest

from maxlm.reporting.curves import MAX_POINTS, break_at_gaps, curve, downsample, finite


def noisy(count, seed=0):
    generator = random.Random(seed)
    return [(float(step), generator.gauss(0, 1)) for step in range(count)]


def test_lines_without_the_key_are_skipped_and_null_is_a_gap():
    lines = [{'step': 1, 'a': 2}, {'step': 2}, {'step': 3, 'a': None}, {'a': 5}, {'step': 'x', 'a': 1}]
    assert curve(lines, 'a') == [(1, 2.0), (3, None)]
    assert finite(curve(lines, 'a')) == [(1, 2.0)]
    assert curve(lines, 'a', 10) == [(1, 20.0), (3, None)]


@pytest.mark.parametrize('count', [0, 1, MAX_POINTS, MAX_POINTS + 1, 12_345, 100_000])
def test_downsampling_keeps_ends_and_extremes(count):
    points = noisy(count)
    kept = downsample(points)
    assert len(kept) <= MAX_POINTS
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        for extreme in (min, max):
            assert extreme(kept, key=lambda point: point[1]) == extreme(points, key=lambda point: point[1])


def test_downsampling_keeps_a_spike_of_one_step():
    points = [(float(step), 9.0 if step == 4321 else 1.0) for step in range(50_000)]
    assert (4321.0, 9.0) in downsample(points)
    assert (4321.0, 9.0) not in points[:: len(points) // MAX_POINTS]


def test_downsampling_keeps_gaps():
    points = [(x, None if 3000 <= x < 3010 else y) for x, y in noisy(20_000)]
    kept = downsample(points)
    assert len(kept) <= MAX_POINTS
    assert any(y is None for _, y in kept)


def test_a_pause_breaks_a_curve():
    points = [(0.0, 1.0), (10.0, 1.0), (60.0, 1.0)]
    assert break_at_gaps(points, 20.0) == [(0.0, 1.0), (10.0, 1.0), (35.0, None), (60.0, 1.0)]
    assert break_at_gaps(points, 50.0) == points
