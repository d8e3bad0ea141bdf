"""Tests that overfitting is reported only if the validation loss rises while the training loss falls."""

import pytest

from maxlm.reporting.overfitting import find_overfitting


def curves(training, validation, steps=range(100, 900, 100)):
    evaluations = [(float(step), value) for step, value in zip(steps, validation, strict=False)]
    means = [(float(step), value) for step, value in zip(steps, training, strict=False)]
    # Each interval has ten lines, with noise that cancels out.
    lines = [(step - 100 + 10 * (n + 1), y + (0.5 if n % 2 else -0.5)) for step, y in means for n in range(10)]
    return lines, evaluations


FALLING = (5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.2, 1.0)
RISING_LATE = (5.0, 4.0, 3.2, 3.0, 3.1, 3.3, 3.5, 3.6)


def test_overfitting_is_detected_and_described():
    found = find_overfitting(*curves(FALLING, RISING_LATE))
    assert (found.since, found.until) == (400, 800)
    assert found.validation == (3.0, 3.6)
    assert found.training == pytest.approx((2.5, 1.0))
    for words in ('since step 400', 'from 3.000 to 3.600', 'from 2.500 to 1.000', 'best checkpoint is step 400'):
        assert words in found.summary


@pytest.mark.parametrize(
    ('training', 'validation'),
    [
        # Both losses fall.
        (FALLING, (5.0, 4.5, 4.0, 3.5, 3.4, 3.3, 3.2, 3.1)),
        # Both losses rise: the run diverges.
        ((5.0, 4.0, 3.0, 2.5, 2.6, 2.8, 3.0, 3.1), RISING_LATE),
        # The training loss stays constant.
        ((5.0, 4.0, 3.0, 2.5, 2.5, 2.5, 2.5, 2.5), RISING_LATE),
        # The rise is only noise.
        (FALLING, (5.0, 4.0, 3.2, 3.000, 3.01, 3.02, 3.005, 3.01)),
        # The last evaluation is the second best.
        (FALLING, (5.0, 4.5, 4.0, 3.5, 3.4, 3.3, 3.1, 3.2)),
        # The first evaluation is the best.
        (FALLING, (3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7)),
        (FALLING, (5.0, 4.0)),
        (FALLING, ()),
        ((), RISING_LATE),
    ],
)
def test_no_overfitting(training, validation):
    assert find_overfitting(*curves(training, validation)) is None


def test_evaluations_without_a_value_do_not_count():
    lines, evaluations = curves(FALLING, RISING_LATE)
    assert find_overfitting(lines, [*evaluations, (900.0, None)]) == find_overfitting(lines, evaluations)
