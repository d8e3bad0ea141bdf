"""Tests downsampled curves: few points with the same minima and maxima, independent of how points are added."""

import random

import pytest

from maxlm.monitoring.downsample import Curves, DownsampledCurve


def downsampled(points, size):
    curve = DownsampledCurve(max_buckets=100)
    for start in range(0, len(points), size):
        curve.add(points[start : start + size])
    return curve.points()


@pytest.mark.parametrize('size', [1, 7, 1000, 10_000])
def test_few_points_keep_all_extremes(size):
    rng = random.Random(0)
    points = [(step, rng.random()) for step in range(10_000)]
    points[1234] = (1234, 9.0)
    points[5678] = (5678, -9.0)
    found = downsampled(points, size)
    assert len(found) <= 2 * 100 + 1
    assert set(found) <= set(points)
    assert {(1234, 9.0), (5678, -9.0), points[-1]} <= set(found)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    # Old and new points have the same density.
    first = sum(x < 5000 for x, _ in found)
    assert 0.4 < first / len(found) < 0.6


def test_short_curve_keeps_all_points():
    points = [(10 * step, float(step)) for step in range(100)]
    assert downsampled(points, 1) == downsampled(points, 100) == points
    assert downsampled(points[:50], 1) != points


def test_gaps_are_kept():
    points = [(step, None if 3000 <= step < 6000 else 1.0) for step in range(10_000)]
    gaps = [x for x, y in downsampled(points, 500) if y is None]
    assert 20 < len(gaps) < 60
    assert all(3000 <= x < 6000 for x in gaps)


def lines(steps, loss):
    return [{'step': step, 'train/loss': loss} for step in steps]


def test_appended_metrics_are_added_and_other_metrics_are_recomputed(monkeypatch):
    curves = Curves(['train/loss', 'eval/loss'])
    metrics = lines(range(10), 1.0)
    assert curves.update(metrics)['train/loss'] == [(step, 1.0) for step in range(10)]
    metrics = [*metrics, *lines(range(10, 12), 2.0), {'step': 12, 'eval/loss': 3.0}]
    added = []
    original = DownsampledCurve.add
    monkeypatch.setattr(
        DownsampledCurve, 'add', lambda self, points: (added.append(len(points)), original(self, points))
    )
    found = curves.update(metrics)
    assert added == [2, 1]
    assert found == Curves(['train/loss', 'eval/loss']).update(metrics)
    # A rollback replaces the last lines.
    other = [*metrics[:5], *lines(range(5, 30), 7.0)]
    assert curves.update(other) == Curves(['train/loss', 'eval/loss']).update(other)
    assert curves.update(metrics[:3])['train/loss'] == [(step, 1.0) for step in range(3)]
    assert curves.update([]) == {'train/loss': [], 'eval/loss': []}
