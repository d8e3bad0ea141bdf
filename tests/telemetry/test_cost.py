"""Tests prices and their sources, the projected cost of a run, and the text of the log."""

import math

import pytest

from maxlm.hardware.prices import PRICES
from maxlm.telemetry.cost import cost_metrics, cost_text, price_of
from tests.small import small_config


def test_price_comes_from_config_or_table():
    config = small_config()
    assert price_of(config, 'NVIDIA H100 80GB HBM3') == (3.99, PRICES['h100'].source)
    # The price table contains no CPUs and not every GPU.
    assert price_of(config, 'cpu') is None
    assert price_of(config, 'NVIDIA T400') is None
    config = small_config(train__price_per_hour=1.5)
    for kind in ('NVIDIA H100 80GB HBM3', 'cpu'):
        assert price_of(config, kind) == (1.5, 'train.price_per_hour')


def test_metrics_and_text_with_and_without_a_price():
    metrics = cost_metrics(1800.0, 6.0, dollars_per_hour=12.0, seconds_left=7380.0)
    assert metrics == {
        'cost/hours': 0.5,
        'cost/dollars': 6.0,
        'perf/eta_seconds': 7380.0,
        'cost/projected_dollars': pytest.approx(6.0 + 2.05 * 12.0),
    }
    assert cost_text(metrics) == '$6.00 of $30.60, 2 h 03 min left'
    metrics = cost_metrics(1800.0, None, dollars_per_hour=0.0, seconds_left=90.0)
    assert set(metrics) == {'cost/hours', 'perf/eta_seconds'}
    assert cost_text(metrics) == '1 min 30 s left'


def test_unknown_remaining_time_is_omitted():
    metrics = cost_metrics(3600.0, 1234.5, dollars_per_hour=12.0, seconds_left=math.nan)
    assert metrics == {'cost/hours': 1.0, 'cost/dollars': 1234.5}
    assert cost_text(metrics) == '$1,234.50'
    assert cost_text({}) == ''
