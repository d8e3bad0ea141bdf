"""Measured numbers with their uncertainty, and differences between models.

Shapes: N units that were measured one by one: windows of text, documents, problems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# 95 % of a normal distribution lie within this many standard deviations.
Z_95 = 1.959964
# exp of more than this overflows float64.
MAX_EXPONENT = 700.0


class Measure(NamedTuple):
    """A mean with its standard error, where that is known.

    values: what it is a mean of, float64 [N], and how much each counts; for differences between models that were
    measured on the same units.
    """

    name: str
    value: float
    error: float | None
    values: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence."""
        if self.error is None or not math.isfinite(self.error):
            return None
        return self.value - Z_95 * self.error, self.value + Z_95 * self.error


def mean_of(name: str, values: np.ndarray, weights: np.ndarray | None = None) -> Measure:
    """Σ weights · values / Σ weights over N ≥ 1 units, which count as independent draws.

    The error is that of a ratio estimator (Cochran 1977, "Sampling Techniques", eq. 6.13); without weights that is the
    standard error of the mean. Of a single unit there is none, nor of units that are all alike: no right answer among
    thirty does not mean that there never is one.
    """
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    # A unit in which nothing was measured has no value.
    values, weights = values[weights > 0], weights[weights > 0]
    N, total = len(values), weights.sum()
    value = float((values * weights).sum() / total)
    residuals = (values - value) * weights
    error = math.sqrt(N / max(N - 1, 1) * float((residuals**2).sum())) / float(total)
    return Measure(name, value, None if np.ptp(values) == 0 else error, values, weights)


def exponential_of(name: str, mean: Measure) -> Measure:
    """Returns exp(mean), with the error by the delta method.

    Its values are those of the linear approximation around the mean, so that `difference` of two of these compares them
    unit by unit.
    """
    value = math.exp(mean.value) if mean.value < MAX_EXPONENT else math.inf
    error = None if mean.error is None else value * mean.error
    if mean.values is None or math.isinf(value):
        return Measure(name, value, error)
    return Measure(name, value, error, value * (1 + mean.values - mean.value), mean.weights)


def difference(first: Measure, second: Measure) -> Measure | None:
    """`second` minus `first`.

    On the same units the error is that of their differences, which is far smaller than that of either; otherwise both
    add up. None where a value is not a number.
    """
    name, change = second.name, second.value - first.value
    if not math.isfinite(change):
        return None
    if first.values is not None and second.values is not None and len(first.values) == len(second.values):
        assert first.weights is not None
        assert second.weights is not None
        if np.array_equal(first.weights, second.weights):
            return mean_of(name, second.values - first.values, first.weights)
    if first.error is None or second.error is None:
        return Measure(name, change, None)
    return Measure(name, change, math.hypot(first.error, second.error))
