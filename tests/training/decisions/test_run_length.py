"""Number of steps of runs with a budget in hours or dollars, and the resulting learning rates."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.training.decisions.run_control import RunControl, apply_control, from_json, to_json
from maxlm.training.decisions.run_length import (
    Costs,
    at_start,
    budget_left,
    budget_seconds,
    decide_length,
    measured_steps,
    next_decision,
    progress_of,
    seconds_until,
)
from maxlm.training.optimizers.schedule import Progress, make_schedule
from maxlm.training.state import with_progress
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state

SCHEDULES = ['cosine', 'linear', 'wsd', 'constant']


def hours(budget=1.0, **settings):
    return small_config(
        **{'train__num_steps': 0, 'train__hours': budget, 'checkpoint__save_interval_steps': 0, **settings}
    )


def rates(config, progress, steps):
    return np.asarray(scheduled_rates(config.optimizer, jax.tree.map(jnp.float32, progress), jnp.arange(300)))[
        list(steps)
    ]


@functools.partial(jax.jit, static_argnums=0)
def scheduled_rates(config, progress, steps):
    return jax.vmap(make_schedule(config, UNDECIDED_STEPS, progress))(steps)


def test_budgets_in_seconds():
    assert budget_seconds(hours(2.0), 8) == 7200
    assert budget_left(RunControl(hours=0.5), hours(2.0), 8) == 5400
    dollars = small_config(train__num_steps=0, train__dollars=100.0, train__price_per_hour=1.5)
    # 100 dollars pay for 8 devices at 1.5 dollars per hour for 8.33 hours.
    assert budget_seconds(dollars, 8) == pytest.approx(30_000)
    assert budget_left(RunControl(dollars=10.0), dollars, 8) == pytest.approx(27_000)


def test_the_length_fits_the_remaining_budget():
    config = hours()
    # A quarter of an hour is spent. Steps of half a second fill the remaining 2700 s minus 1 % of the budget.
    chosen = decide_length(RunControl(hours=0.25), step=25, costs=Costs(0.5), num_devices=8, config=config)
    assert chosen.num_steps == 25 + 5328 == apply_control(config, chosen).train.num_steps
    dollars = small_config(train__num_steps=0, train__dollars=100.0, train__price_per_hour=1.5)
    chosen = decide_length(RunControl(dollars=10.0), step=25, costs=Costs(8.0), num_devices=8, config=dollars)
    assert chosen.num_steps == 25 + 3337
    # An exhausted budget still allows one step; an unlimited budget has a finite length.
    assert decide_length(RunControl(hours=2.0), step=25, costs=Costs(0.5), num_devices=8, config=config).num_steps == 26
    assert (
        decide_length(RunControl(), step=25, costs=Costs(0.0), num_devices=8, config=config).num_steps < UNDECIDED_STEPS
    )


def test_evaluations_and_saves_are_part_of_the_time():
    every = {
        'eval__interval': 10,
        'eval__tasks_interval': 25,
        'eval__tasks': ('arc_easy',),
        'checkpoint__save_interval_steps': 20,
        'checkpoint__keep_period': 50,
    }
    config = small_config(**every)
    costs = Costs(step=1.0, evaluation=100.0, tasks=1e4, save=1e6, last_save=5e6)
    # From step 5: evaluations at 10, 20, …, 90 and at the end, tasks at 25, 50, 75, saves at 20, …, 80 and 50.
    assert seconds_until(100, step=5, costs=costs, config=config) == 95 + 10 * 100 + 4 * 1e4 + 5 * 1e6 + 5e6
    assert seconds_until(91, step=90, costs=costs, config=config) == 1 + 100 + 1e4 + 5e6
    by_minutes = small_config(checkpoint__save_interval_steps=0, checkpoint__save_interval_minutes=1.0)
    assert seconds_until(130, step=0, costs=Costs(1.0, save=5.0), config=by_minutes) == 130 + 3 * 5
    # All steps fit into the budget, but one more would not.
    config = hours(**every)
    costs = Costs(step=2.0, evaluation=7.0, tasks=31.0, save=3.0, last_save=20.0)
    length = decide_length(RunControl(), step=3, costs=costs, num_devices=1, config=config).num_steps
    needed = [seconds_until(length + more, step=3, costs=costs, config=config) for more in (0, 1)]
    assert needed[0] <= 3564 < needed[1]


def test_a_small_change_of_the_estimate_changes_nothing():
    config = hours()
    first = decide_length(RunControl(), step=25, costs=Costs(1.0), num_devices=1, config=config)
    for costs, changes in [(1.01, False), (0.99, False), (1.05, True), (0.95, True)]:
        again = decide_length(first, step=30, costs=Costs(costs), num_devices=1, config=config)
        assert (again != first) == changes, costs


@pytest.mark.parametrize('name', SCHEDULES)
def test_a_length_that_never_changes_has_the_rates_of_a_fixed_one(name):
    config = hours(optimizer__schedule=name, optimizer__warmup_steps=10, optimizer__min_learning_rate=1e-3)
    progress = progress_of(RunControl(num_steps=110), config)
    fixed = make_schedule(config.optimizer, 110)
    np.testing.assert_allclose(rates(config, progress, range(111)), [fixed(n) for n in range(111)], rtol=2e-5)
    # A run that ends within its warm-up only warms up.
    short = rates(config, progress_of(RunControl(num_steps=8), config), range(8))
    np.testing.assert_allclose(short, [1e-3 * (n + 1) for n in range(8)], rtol=1e-5)


@pytest.mark.parametrize('name', SCHEDULES)
@pytest.mark.parametrize('at', [4, 40, 90])
@pytest.mark.parametrize('length', [60, 100, 200])
def test_rates_never_jump_and_end_at_the_minimum(name, at, length):
    """Changes the length during the warm-up, in the middle and during the decay."""
    config = hours(optimizer__schedule=name, optimizer__warmup_steps=10, optimizer__min_learning_rate=1e-3)
    length = max(length, at + 5)
    first = RunControl(num_steps=100)
    before = progress_of(first, config)
    second = first._replace(num_steps=length, planned_step=at, planned_share=before.at(at), warmup_share=before.warmup)
    after = progress_of(from_json(json.loads(json.dumps(to_json(second)))), config)
    old, new = rates(config, before, range(at + 1)), rates(config, after, range(at, length + 1))
    assert new[0] == pytest.approx(old[-1], rel=1e-5)
    assert new[-1] == pytest.approx(1e-2 if name == 'constant' else 1e-3, rel=1e-5)
    # The warm-up keeps its number of steps, and the rate never increases after it.
    rise = np.concatenate([old[:-1], new])
    np.testing.assert_allclose(rise[:10], [1e-3 * (n + 1) for n in range(10)], rtol=1e-5)
    assert (np.diff(rise[10:]) <= 1e-9).all()
    if name == 'wsd':
        # The decay is linear over the last fifth of the progress.
        share = np.concatenate([[before.at(n) for n in range(at)], [after.at(n) for n in range(at, length + 1)]])
        expected = np.where(share > 0.8, 1e-2 - 9e-3 * (share - 0.8) / 0.2, 1e-2)
        np.testing.assert_allclose(rise[10:], expected[10:], rtol=1e-4)


def test_all_lengths_share_one_program():
    config = hours(model__num_layers=1, optimizer__warmup_steps=0)
    layout = small_layout(config)
    state = small_state(config, layout)
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    step = jax.jit(make_train_step(config, layout)).lower(state, batch).compile()
    embeddings = []
    for share, num_steps in [(0.0, UNDECIDED_STEPS), (0.25, 9), (0.5, 4)]:
        progress = Progress(0, share, num_steps, 0.0)
        after, metrics = step(with_progress(state, progress, layout), batch)
        assert metrics['learning_rate'] == pytest.approx(rates(config, progress, [0])[0], rel=1e-6)
        assert after.progress == with_progress(state, progress, layout).progress
        embeddings.append(np.asarray(after.params['embedding'] - state.params['embedding']))
    # Updates use the reported rates.
    moved = [np.abs(embedding).mean() for embedding in embeddings]
    assert moved[2] / moved[0] == pytest.approx(0.5, rel=1e-3)
    assert moved[0] > moved[1] > moved[2]


def test_measured_steps_and_times_of_decisions():
    assert measured_steps(RunControl(), 3) == 20
    assert [measured_steps(RunControl(num_steps=10_000), step) for step in (30, 9950, 9999)] == [100, 50, 4]
    config = hours()
    found = [
        next_decision(100, seconds_left=left, step_seconds=seconds, config=config, num_devices=1)
        for left, seconds in ((3000, 1), (50, 1), (3000, 0.1), (1, 60), (1, 0))
    ]
    assert found[:4] == [118, 105, 280, 101]
    assert found[4] > 1000


def test_another_budget_rescales_the_schedule():
    saved = RunControl(num_steps=100, planned_step=40, planned_share=0.3, warmup_share=0.05, hours=0.9, budget=1.0)
    assert at_start(saved, hours(1.0), 90) == saved
    # The state is from an older version, or new.
    assert at_start(saved._replace(budget=0.0), hours(2.0), 90) == saved._replace(budget=0.0)
    assert at_start(RunControl(), hours(2.0), 0) == RunControl()
    twice = at_start(saved, hours(2.0), 90)
    assert (twice.num_steps, twice.planned_step, twice.planned_share, twice.budget) == (0, 90, 0.45, 2.0)
    assert progress_of(twice, hours(2.0)).warmup == pytest.approx(0.45 * 2 / 90)
    longer = decide_length(twice, step=91, costs=Costs(36.0), num_devices=1, config=hours(2.0))
    assert longer.num_steps == 91 + 108
    # A run with num_steps drops the decided length, and a run that had num_steps before gets one.
    assert at_start(saved, small_config(), 90).num_steps == 0
    assert at_start(RunControl(hours=0.5), hours(2.0), 90).planned_share == 0.25


def test_progress():
    line = Progress(20, 0.25, 120, 0.1)
    assert [line.at(step) for step in (20, 70, 120)] == [0.25, 0.625, 1.0]
