"""Measurements with uncertainty, and differences between models.

Shapes: N independently measured units: windows of text, documents or problems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# 95 % of a normal distribution is within this number of standard deviations.
Z_95 = 1.959964
# Larger exponents overflow float64.
MAX_EXPONENT = 700.0


class Measure(NamedTuple):
    """A mean with its standard error.

    Attributes:
        name: name of the metric.
        value: the mean.
        error: standard error, or None if unknown.
        values: values of the units, float64 [N], or None. Used for paired differences between models.
        weights: weights of the units, float64 [N], or None.
    """

    name: str
    value: float
    error: float | None
    values: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval, or None if the error is unknown."""
        if self.error is None or not math.isfinite(self.error):
            return None
        return self.value - Z_95 * self.error, self.value + Z_95 * self.error


def mean_of(name: str, values: np.ndarray, weights: np.ndarray | None = None) -> Measure:
    """Returns Σ weights · values / Σ weights over N ≥ 1 independent units.

    The error is that of a ratio estimator (Cochran 1977, "Sampling Techniques", eq. 6.13). Without weights, it is the
    standard error of the mean. It is None for a single unit and for equal values: if all of thirty responses are wrong,
    the success rate is not known to be exactly 0.
    """
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    # Units of weight 0 were not measured.
    values, weights = values[weights > 0], weights[weights > 0]
    N, total = len(values), weights.sum()
    value = float((values * weights).sum() / total)
    residuals = (values - value) * weights
    error = math.sqrt(N / max(N - 1, 1) * float((residuals**2).sum())) / float(total)
    return Measure(name, value, None if np.ptp(values) == 0 else error, values, weights)


def exponential_of(name: str, mean: Measure) -> Measure:
    """Returns exp(mean), with the error by the delta method.

    The values are linearized around the mean, so that `difference` can compare two such measures unit by unit.
    """
    value = math.exp(mean.value) if mean.value < MAX_EXPONENT else math.inf
    error = None if mean.error is None else value * mean.error
    if mean.values is None or math.isinf(value):
        return Measure(name, value, error)
    return Measure(name, value, error, value * (1 + mean.values - mean.value), mean.weights)


def difference(first: Measure, second: Measure) -> Measure | None:
    """Returns `second` minus `first`, or None if the difference is not finite.

    For the same units, the error is that of the paired differences, which is usually much smaller. Otherwise the errors
    are combined as independent.
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
