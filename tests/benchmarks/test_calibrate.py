"""Tests the fitted constants of the step-time model, and their errors on held-out points."""

import numpy as np
import pytest

from benchmarks.calibrate import FIXED, calibrate, errors, hold_out, predict
from benchmarks.published import published
from maxlm.planning.estimate.roofline import EFFICIENCIES


@pytest.fixture(scope='module')
def points():
    by_platform = {'gpu': [], 'tpu': []}
    for point in published():
        by_platform[point.chip.platform].append(point)
    return by_platform


def shapes(points):
    """Returns the model shape and chip of each point, as groups to hold out."""
    return [(point.chip.name, point.config.model.num_layers, point.config.model.dim) for point in points]


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_stored_constants_are_the_fitted_ones(points, platform):
    fitted = calibrate(points[platform]).efficiencies
    assert set(fitted) == {'gpu': {'a100', 'h100'}, 'tpu': {'v4', 'v5e', 'v5p'}}[platform]
    for chip, efficiency in fitted.items():
        assert EFFICIENCIES[chip] == pytest.approx(efficiency, abs=2e-3)
        assert {name: getattr(efficiency, name) for name in FIXED[platform]} == FIXED[platform]


def test_a_fit_follows_its_points(points):
    """Control: with times shorter by a factor of 1.2, the constants differ."""
    faster = [point._replace(tokens_per_second=1.2 * point.tokens_per_second) for point in points['tpu']]
    for chip, efficiency in calibrate(faster).efficiencies.items():
        assert efficiency.products > EFFICIENCIES[chip].products + 0.02


# Errors of the logarithm of time, rounded up: median and worst.
@pytest.mark.parametrize(('platform', 'median', 'worst'), [('gpu', 0.045, 0.24), ('tpu', 0.025, 0.10)])
def test_error_of_the_fit(points, platform, median, worst):
    found = np.abs(errors(points[platform], calibrate(points[platform])))
    assert np.median(found) < median
    assert found.max() < worst


@pytest.mark.parametrize(('platform', 'median', 'worst'), [('gpu', 0.055, 0.25), ('tpu', 0.055, 0.18)])
def test_error_on_held_out_models(points, platform, median, worst):
    held_out = hold_out(points[platform], shapes(points[platform]))
    assert held_out.median < median
    assert held_out.worst < worst


def test_error_on_held_out_sources(points):
    held_out = hold_out(points['gpu'], [point.source for point in points['gpu']])
    assert held_out.median < 0.10
    assert held_out.worst < 0.22
    # MosaicML's source is never held out, since no other source determines its constants.
    assert set(held_out.by_source) == {point.source for point in points['gpu']} - {'llm-foundry'}


def test_wrong_point_has_a_large_error(points):
    """Control: a held-out point is compared and not fitted."""
    wrong = [
        point._replace(tokens_per_second=3 * point.tokens_per_second) if point.name == 'GPT-2 1.56B' else point
        for point in points['gpu']
    ]
    held_out = hold_out(wrong, [point.source for point in wrong])
    assert held_out.by_source['llm.c'] > 0.8


def test_prediction_uses_the_constants(points):
    calibration = calibrate(points['tpu'])
    point = points['tpu'][0]
    slower = {chip: of._replace(products=of.products / 2) for chip, of in calibration.efficiencies.items()}
    assert predict(point, calibration._replace(efficiencies=slower)) > 1.6 * predict(point, calibration)
