"""Learning-rate schedules against their formulas, and runs that are too short for a schedule."""

import math

import optax
import pytest

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.training.optimizers.schedule import make_schedule


def schedule(num_steps, **settings):
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, **settings), num_steps)
    return lambda step: float(rate(step))


def test_warmup_then_cosine():
    rate = schedule(110, min_learning_rate=0.1, warmup_steps=10)
    for step, value in [(0, 0.1), (5, 0.6), (9, 1), (10, 1), (60, 0.55), (110, 0.1), (500, 0.1)]:
        assert rate(step) == pytest.approx(value, abs=1e-6), step
    assert rate(35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-6)


def test_warmup_then_linear():
    rate = schedule(110, schedule='linear', min_learning_rate=0.1, warmup_steps=10)
    for step, value in [(0, 0.1), (5, 0.6), (10, 1), (35, 0.775), (60, 0.55), (110, 0.1), (500, 0.1)]:
        assert rate(step) == pytest.approx(value, abs=1e-6), step
    # Negative control: a cosine schedule differs after a quarter of the steps.
    assert abs(schedule(110, min_learning_rate=0.1, warmup_steps=10)(35) - rate(35)) > 0.05


def test_warmup_then_stable_then_decay():
    rate = schedule(100, schedule='wsd', wsd_decay_fraction=0.2, min_learning_rate=0.5, warmup_steps=10)
    for step, value in [(0, 0.1), (8, 0.9), (9, 1), (50, 1), (80, 1), (81, 0.975), (90, 0.75), (100, 0.5), (200, 0.5)]:
        assert rate(step) == pytest.approx(value, abs=1e-6), step


def test_a_decay_that_would_begin_within_the_warmup_begins_at_its_end():
    overlapping = schedule(100, schedule='wsd', wsd_decay_fraction=0.9, warmup_steps=50)
    linear = schedule(100, schedule='linear', warmup_steps=50)
    for step, value in [(24, 0.5), (50, 1), (75, 0.5), (100, 0)]:
        assert overlapping(step) == pytest.approx(value, abs=1e-6), step
    assert [overlapping(step) for step in range(101)] == [linear(step) for step in range(101)]
    # Negative control: a shorter decay starts later.
    assert schedule(100, schedule='wsd', wsd_decay_fraction=0.4, warmup_steps=50)(59) == 1


def test_a_decay_is_at_least_one_step():
    rate = schedule(10, schedule='wsd', wsd_decay_fraction=0.001, warmup_steps=2)
    assert [rate(step) for step in (2, 9, 10)] == [1, 1, 0]


@pytest.mark.parametrize('name', ['cosine', 'linear', 'wsd', 'constant'])
def test_no_warmup_begins_at_the_peak(name):
    assert schedule(10, schedule=name)(0) == 1


@pytest.mark.parametrize('name', ['cosine', 'linear', 'wsd', 'constant'])
@pytest.mark.parametrize('num_steps', [2, 2000])
def test_a_run_that_is_no_longer_than_its_warmup_stays_in_it(name, num_steps):
    rate = schedule(num_steps, schedule=name, warmup_steps=2000)
    assert rate(0) == pytest.approx(1 / 2000, rel=1e-4)
    assert rate(1998) == pytest.approx(1999 / 2000, rel=1e-4)
    assert rate(1999) == rate(2000) == 1


def test_constant():
    constant = schedule(10, schedule='constant', warmup_steps=2)
    assert [constant(step) for step in (0, 1, 2, 9, 100)] == [0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ('num_steps', 'warmup_steps', 'rates'),
    [
        (7, 0, {5: 1.0, 6: 1.0, 7: 0.1}),
        (12, 2, {9: 1.0, 10: 1.0, 11: 0.55, 12: 0.1}),
        (104, 10, {83: 1.0, 84: 0.957, 89: 0.743, 104: 0.1}),
    ],
)
def test_a_decay_lasts_a_whole_number_of_steps(num_steps, warmup_steps, rates):
    rate = schedule(num_steps, schedule='wsd', wsd_decay_fraction=0.2, min_learning_rate=0.1, warmup_steps=warmup_steps)
    assert {step: rate(step) for step in rates} == pytest.approx(rates, abs=1e-3)


def test_fixed_lengths_equal_optax_bit_for_bit():
    # Runs of earlier versions resume with the same rates.
    found = schedule(50, min_learning_rate=0.1, warmup_steps=5, warmup_from_zero=True)
    expected = optax.warmup_cosine_decay_schedule(0, 1, 5, 50, end_value=0.1)
    assert [found(step) for step in range(55)] == [float(expected(step)) for step in range(55)]
    # The default is one update ahead in the warm-up, and equal after it.
    ahead = schedule(50, min_learning_rate=0.1, warmup_steps=5)
    assert [ahead(step) for step in range(5)] == [found(step) for step in range(1, 6)]
    assert [ahead(step) for step in range(5, 55)] == [found(step) for step in range(5, 55)]
