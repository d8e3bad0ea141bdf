"""Tests the best model for a budget, against the scaling law's closed form and on machines that favor some sizes."""

import json
import math

import pytest

from maxlm.errors import InputError
from maxlm.model.parameters import count_parameters
from maxlm.planning.budget import plan_budget
from maxlm.planning.chinchilla import HOFFMANN, compute_optimal
from maxlm.planning.cost import PricingTerms
from maxlm.planning.scaling import Prediction, sweep_sizes
from maxlm.planning.tables import as_json, budget_table
from tests.planning.test_scaling import DATA, H100, config

PEAK = 64 * H100.tflops * 1e12


def machine(mfu=lambda parameters: 0.5, limit=math.inf):
    def predict(resolved, chip, num_devices):
        N, tokens = count_parameters(resolved.model), resolved.train.global_batch_size * resolved.data.seq_len
        seconds = 6 * N * tokens / (mfu(N) * num_devices * chip.tflops * 1e12)
        return Prediction(seconds, 16 * N, limit > N)

    return predict


def points(predict):
    # The run saves once, so that all of its time is spent in steps.
    return sweep_sizes(config(checkpoint__save_interval_steps=0), H100, 64, predict, DATA)


def test_equal_speed_gives_the_optimum_of_the_law():
    plan = plan_budget(points(machine()), H100, hours=100)
    law = compute_optimal(0.5 * PEAK * 100 * 3600)
    assert plan.optimum.parameters == pytest.approx(law.parameters, rel=0.02)
    assert plan.optimum.tokens == pytest.approx(law.tokens, rel=0.02)
    assert plan.optimum.loss == pytest.approx(law.loss, rel=1e-4)
    assert plan.best.loss == min(row.loss for row in plan.rows)
    assert plan.best.loss >= plan.optimum.loss
    assert plan.by_law.parameters == pytest.approx(law.parameters, rel=0.02)


def test_machines_that_favor_large_models_get_larger_ones():
    even = plan_budget(points(machine()), H100, hours=100).optimum
    favored = plan_budget(points(machine(lambda N: min(0.5, 0.5 * (N / 6e10) ** 0.3))), H100, hours=100).optimum
    assert favored.parameters > 1.2 * even.parameters
    assert favored.loss > even.loss


def test_dollars_are_hours_at_a_price():
    sizes = points(machine())
    hours = plan_budget(sizes, H100, hours=100)
    dollars = plan_budget(sizes, H100, dollars=100 * 64 * 3.99)
    assert dollars.best == pytest.approx(hours.best)
    own = plan_budget(sizes, H100, dollars=100 * 64 * 2.0, terms=PricingTerms(price=2.0))
    assert own.best == pytest.approx(hours.best)
    assert plan_budget(sizes, H100, dollars=100 * 64 * 2.0).best.loss > own.best.loss


def test_a_larger_budget_trains_a_larger_model():
    sizes = points(machine())
    optima = [plan_budget(sizes, H100, hours=hours).optimum for hours in (1, 10, 100)]
    assert [best.parameters for best in optima] == sorted(best.parameters for best in optima)
    assert optima[0].loss > optima[1].loss > optima[2].loss


def test_sizes_that_do_not_fit_are_not_chosen():
    free = plan_budget(points(machine()), H100, hours=1000)
    tight = plan_budget(points(machine(limit=3e9)), H100, hours=1000)
    assert free.best.parameters > 3e9 > tight.best.parameters
    assert tight.optimum.parameters < 3e9
    assert len(tight.rows) == len(free.rows)
    with pytest.raises(InputError, match=r'the smallest \(13\dM parameters\) needs 2\.\d\d GiB of 79\.1 GiB'):
        plan_budget(points(machine(limit=0)), H100, hours=100)


def test_another_law_chooses_another_size():
    sizes = points(machine())
    assert plan_budget(sizes, H100, hours=1000, law=HOFFMANN).optimum.parameters < (
        0.9 * plan_budget(sizes, H100, hours=1000).optimum.parameters
    )


def test_invalid_budgets():
    with pytest.raises(InputError, match='exactly one'):
        plan_budget(points(machine()), H100)
    with pytest.raises(InputError, match='is not positive'):
        plan_budget(points(machine()), H100, hours=0)
    with pytest.raises(InputError, match='no model sizes to compare'):
        plan_budget([], H100, hours=1)


def test_text_and_json():
    plan = plan_budget(points(machine(limit=3e9)), H100, hours=1000)
    text = budget_table(plan)
    assert text.count('best\n') == 1
    assert text.count('does not fit') == sum(not row.fits for row in plan.rows) > 0
    assert 'Besiroglu' in text
    read = json.loads(json.dumps(as_json(plan)))
    assert read['best']['parameters'] == plan.best.parameters
    assert read['law']['alpha'] == plan.law.alpha
