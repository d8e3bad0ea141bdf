"""Tests standard errors against simulation, and differences over the same and over different units."""

import numpy as np
import pytest

from maxlm.evaluation.statistics import Z_95, Measure, difference, exponential_of, mean_of


def test_without_weights_the_error_equals_that_of_a_mean():
    values = np.random.default_rng(0).normal(3, 2, 50)
    measure = mean_of('x', values)
    assert measure.value == pytest.approx(values.mean())
    assert measure.error == pytest.approx(values.std(ddof=1) / np.sqrt(50))
    low, high = measure.interval
    assert (high - low) / 2 == pytest.approx(1.96 * measure.error, rel=1e-3)


def test_coverage_of_intervals_with_unequal_weights():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(600):
        weights = rng.integers(1, 30, 60).astype(float)
        # Values depend on the weights, so the weighted mean differs from the mean over units.
        values = 1 + 0.02 * weights + rng.normal(0, 0.5, 60)
        true_mean = 1 + 0.02 * (29 * 59 / 6) / 15
        low, high = mean_of('x', values, weights).interval
        hits += low < true_mean < high
    assert 0.90 < hits / 600 < 0.985


def test_units_without_weight_do_not_count():
    some = mean_of('x', np.array([1.0, 5.0, 2.0]), np.array([1.0, 0.0, 3.0]))
    assert some.value == pytest.approx(7 / 4)
    assert some.error == mean_of('x', np.array([1.0, 2.0]), np.array([1.0, 3.0])).error
    assert mean_of('x', np.array([1.0])).interval is None
    # Thirty wrong answers do not prove that there are no right answers.
    assert mean_of('x', np.zeros(30)).interval is None


def test_paired_differences_may_be_smaller_than_the_errors():
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 1, 200)
    first, second = mean_of('x', hard), mean_of('x', hard + 0.05 + rng.normal(0, 0.01, 200))
    change = difference(first, second)
    assert change.value == pytest.approx(second.value - first.value)
    assert change.interval[0] > 0
    assert change.error < first.error / 20
    # Control: for different units only the errors are known.
    unpaired = difference(first._replace(values=None), second)
    assert unpaired.error == pytest.approx(np.hypot(first.error, second.error))
    assert unpaired.interval[0] < 0
    # Units with different weights are different units.
    assert difference(first, mean_of('x', hard, np.arange(1.0, 201))).error > first.error


def test_values_without_errors_have_differences_without_errors():
    assert difference(Measure('x', 1.0, None), Measure('x', 3.0, 0.1)) == Measure('x', 2.0, None)
    assert difference(Measure('x', 1.0, None), Measure('x', float('nan'), None)) is None
    assert Measure('x', 1.0, None).interval is None
    assert Measure('x', 1.0, 1.0).interval == (1 - Z_95, 1 + Z_95)


def test_the_exponential_of_a_mean():
    loss = mean_of('loss', np.array([1.0, 2.0, 3.0]))
    perplexity = exponential_of('perplexity', loss)
    assert perplexity.value == pytest.approx(np.exp(2))
    assert perplexity.error == pytest.approx(np.exp(2) * loss.error)
    assert mean_of('', perplexity.values, perplexity.weights).error == pytest.approx(perplexity.error)
    large = exponential_of('perplexity', loss._replace(value=1e6))
    assert (large.value, large.values) == (np.inf, None)
    assert exponential_of('perplexity', Measure('loss', 2.0, None)).error is None


def test_paired_perplexities_differ_as_their_losses_do():
    rng = np.random.default_rng(3)
    hard, weights = rng.normal(4, 1, 400), rng.integers(1, 30, 400).astype(float)
    losses = [mean_of('loss', values, weights) for values in (hard, hard - 0.001 + rng.normal(0, 0.004, 400))]
    first, second = (exponential_of('perplexity', loss) for loss in losses)
    of_losses, of_perplexities = difference(*losses), difference(first, second)
    assert of_perplexities.value == pytest.approx(second.value - first.value)
    # exp(b) - exp(a) is nearly exp(a) · (b - a) if b is near a.
    assert of_perplexities.error == pytest.approx(first.value * of_losses.error, rel=0.02)
    assert [bound < 0 for bound in of_perplexities.interval] == [bound < 0 for bound in of_losses.interval]
    # Control: without the units the interval is a thousand times as wide.
    assert difference(first._replace(values=None), second).error > 100 * of_perplexities.error


def test_coverage_of_intervals_of_perplexity_differences():
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(600):
        hard = rng.normal(2, 0.5, 100)
        pair = (hard, hard + 0.3 + rng.normal(0, 0.2, 100))
        low, high = difference(*(exponential_of('', mean_of('', values)) for values in pair)).interval
        hits += low < np.exp(2.3) - np.exp(2) < high
    assert 0.92 < hits / 600 < 0.98
