"""Losses of golden runs, which depend on data, model, optimizer and schedule."""

import json

import pytest

from tests.golden.curve import FULL, SHORT, golden_run

# Curves on other machines agree within this tolerance, and changed recipes exceed it.
TOLERANCE = 1e-2


def read(golden):
    return json.loads(golden.file.read_text())


@pytest.fixture(scope='module')
def short(shared_steps, dataset, tmp_path_factory):
    return golden_run(SHORT, dataset, tmp_path_factory.mktemp('short') / 'run')


def test_short_golden_curve(short):
    assert short == pytest.approx(read(SHORT), rel=TOLERANCE)


def test_the_short_golden_curve_goes_down(short):
    assert short['train/loss 30'] < short['train/loss 5'] - 0.5
    assert short['eval/loss 30'] < short['train/loss 5'] - 0.5


@pytest.mark.parametrize('overrides', [{'data__seed': 1}])
def test_the_tolerance_distinguishes_runs(shared_steps, dataset, tmp_path, short, overrides):
    """Negative control: other data changes each step of the curve."""
    other = golden_run(SHORT, dataset, tmp_path, **overrides)
    wanted = read(SHORT)
    assert sum(loss != pytest.approx(wanted[name], rel=TOLERANCE) for name, loss in other.items()) >= 3


def test_unrolled_layers_have_the_short_golden_curve(shared_steps, dataset, tmp_path, short):
    unrolled = golden_run(SHORT, dataset, tmp_path, model__scan_layers=False)
    assert unrolled == pytest.approx(short, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_golden_curve(dataset, tmp_path):
    golden = read(FULL)
    assert golden_run(FULL, dataset, tmp_path / 'same') == pytest.approx(golden, rel=TOLERANCE)
    # Negative control: even a short run within the common warm-up exceeds the tolerance.
    other = golden_run(FULL, dataset, tmp_path / 'other', train__seed=1, train__num_steps=10)['train/loss 10']
    assert other != pytest.approx(golden['train/loss 10'], rel=TOLERANCE)
