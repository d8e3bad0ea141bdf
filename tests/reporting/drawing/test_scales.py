"""Tests axes: ends, ticks and labels."""

import math
import random

import pytest

from maxlm.reporting.drawing.scales import Scale, covering, labels, ticks, time_labels, time_ticks, without_outliers


def test_a_scale_covers_all_values_and_is_never_empty():
    generator = random.Random(0)
    for _ in range(200):
        values = [generator.uniform(-1, 1) * 10 ** generator.uniform(-9, 9) for _ in range(generator.randint(1, 5))]
        for scale in (covering(values), covering(values, from_zero=True), covering([5.0] * 3), covering([0.0])):
            assert scale.high > scale.low
        assert all(0 <= covering(values).fraction(value) <= 1 for value in values)
    assert covering([]) == (0.0, 1.0, False)


def test_from_zero_starts_at_zero():
    assert covering([3.0, 4.0], from_zero=True).low == 0
    assert covering([3.0, 4.0]).low > 2.9
    assert covering([-1.0, 4.0], from_zero=True).low < -1


def test_logarithmic_scale_ignores_nonpositive_values():
    scale = covering([0.0, -1.0, 1.0, 100.0], log=True)
    assert scale.log
    assert scale.low > 0
    assert scale.fraction(10) == pytest.approx(0.5)
    assert not covering([0.0], log=True).log


@pytest.mark.parametrize(
    ('low', 'high', 'expected'),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.9, 5.6, [2, 3, 4, 5]),
        (-3, 3, [-2, 0, 2]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (1e6 - 2, 1e6 + 2, [999_998, 999_999, 1_000_000, 1_000_001, 1_000_002]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(Scale(low, high)) == pytest.approx(expected)


def test_logarithmic_ticks():
    assert ticks(Scale(0.5, 2000, log=True)) == [1, 10, 100, 1000]
    assert ticks(Scale(1, 50, log=True)) == [1, 2, 5, 10, 20, 50]
    assert 3 <= len(ticks(Scale(1e-30, 1e30, log=True))) <= 8
    # Within a decade, a logarithmic axis has the ticks of a linear one.
    assert ticks(Scale(1, 3, log=True)) == ticks(Scale(1, 3))


def test_ticks_are_few_and_within_the_scale():
    generator = random.Random(1)
    for _ in range(300):
        low = generator.uniform(-1, 1) * 10 ** generator.uniform(-6, 9)
        scale = Scale(low, low + 10 ** generator.uniform(-4, 9))
        found = ticks(scale)
        assert 1 <= len(found) <= 7
        assert all(-1e-6 <= scale.fraction(tick) <= 1 + 1e-6 for tick in found)
        assert len(set(labels(found))) == len(found) or scale.high - scale.low < 1e-4 * abs(low)


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        ([0, 2, 4], ['0', '2', '4']),
        ([0, 0.5, 1.0], ['0.0', '0.5', '1.0']),
        ([2.0, 2.05, 2.1], ['2.00', '2.05', '2.10']),
        ([0, 1000, 2000], ['0', '1,000', '2,000']),
        ([0, 20_000, 40_000], ['0', '20k', '40k']),
        ([0, 1e-4, 2e-4], ['0', '1e-4', '2e-4']),
        ([1, 2, 5, 10], ['1', '2', '5', '10']),
        ([999_998, 999_999], ['999,998', '999,999']),
        ([], []),
    ],
)
def test_labels(values, expected):
    assert labels(values) == expected


@pytest.mark.parametrize(
    ('seconds', 'expected'),
    [
        (30, ['0', '10 s', '20 s', '30 s']),
        (150, ['0', '0 min 30 s', '1 min 00 s', '1 min 30 s', '2 min 00 s', '2 min 30 s']),
        (1500, ['0', '5 min', '10 min', '15 min', '20 min', '25 min']),
        (3 * 3600, ['0', '1 h', '2 h', '3 h']),
        (5400, ['0', '0 h 30 min', '1 h 00 min', '1 h 30 min']),
        (9 * 86400, ['0', '2 d', '4 d', '6 d', '8 d']),
    ],
)
def test_times(seconds, expected):
    assert time_labels(time_ticks(Scale(0.0, seconds))) == expected


def test_first_losses_do_not_flatten_the_curve():
    typical = [2 + math.sin(number) / 10 for number in range(1000)]
    kept = without_outliers([11.0, 10.0, *typical, 30.0])
    assert max(kept) < 3
    assert set(typical) <= set(kept)
    # A slowly falling curve has no outliers. Outliers are not removed from few values.
    falling = [10 - number / 100 for number in range(900)]
    assert without_outliers(falling) == falling
    assert without_outliers([1.0, 100.0]) == [1.0, 100.0]
