"""Run-control decisions: tables, and a rollback in a loop of real steps."""

import json
import math

import jax
import numpy as np
import pytest

from maxlm.data.loader.skipped_batches import data_index, skip_steps
from maxlm.training.decisions.run_control import (
    BadSteps,
    Rollback,
    RunControl,
    Stop,
    after_evaluation,
    apply_control,
    budget_spent,
    ended,
    from_json,
    on_bad_steps,
    rolled_back,
    seconds_left,
    spend,
    stops_early,
    to_json,
    with_rates,
)
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state

MOST = 3
GUARDED = {'guard__max_consecutive_skips': MOST, 'guard__rollback_skip_steps': 5, 'guard__max_rollbacks': 2}


@pytest.mark.parametrize(
    ('bad', 'saved', 'expected'),
    [
        # Too few bad steps.
        (BadSteps(), [0], None),
        (BadSteps(31, 32, 2), [0, 10, 20, 30], None),
        # The newest checkpoint before the margin of five steps, 26 to 30, that precede step 31.
        (BadSteps(31, 33, 3), [0, 10, 20, 25, 30], Rollback(25, 25, 33)),
        (BadSteps(31, 33, 3), [0, 10, 20, 30], Rollback(20, 25, 33)),
        (BadSteps(31, 36, 3), [0], Rollback(0, 25, 36)),
        # Only newer checkpoints exist, so as many steps as possible are skipped.
        (BadSteps(31, 33, 3), [27, 30], Rollback(27, 27, 33)),
        (BadSteps(31, 33, 3), [30, 31, 33], Rollback(30, 30, 33)),
        # The margin is limited by the start of the run.
        (BadSteps(3, 5, 3), [0], Rollback(0, 0, 5)),
        (BadSteps(1, 3, 3), [0], Rollback(0, 0, 3)),
    ],
)
def test_bad_steps_roll_back_to_a_good_checkpoint(bad, saved, expected):
    assert on_bad_steps(RunControl(), bad, saved, small_config(**GUARDED)) == expected
    # The order of the checkpoints does not matter.
    assert on_bad_steps(RunControl(), bad, saved[::-1], small_config(**GUARDED)) == expected


@pytest.mark.parametrize(
    ('decisions', 'saved', 'fragments'),
    [
        (
            RunControl(rollbacks=2),
            [0],
            ['steps 31 to 33', '3 consecutive steps', '2 rollbacks', 'guard.max_rollbacks'],
        ),
        (RunControl(), [31, 40], ['there is no older checkpoint', 'guard.max_consecutive_skips']),
        # A checkpoint from before a change of the batch size counts batches of another size.
        (RunControl(batch_sizes=((0, 0, 8), (26, 26, 16))), [0, 20, 25], ['there is no older checkpoint']),
        (RunControl(), [], ['there is no older checkpoint', 'optimizer.learning_rate', 'guard.spike_threshold']),
    ],
)
def test_a_run_that_cannot_roll_back_stops_with_a_reason(decisions, saved, fragments):
    stop = on_bad_steps(decisions, BadSteps(31, 33, 3), saved, small_config(**GUARDED))
    assert isinstance(stop, Stop)
    assert '\n' not in stop.reason
    for fragment in fragments:
        assert fragment in stop.reason
    off = small_config(**{**GUARDED, 'guard__max_rollbacks': 0})
    assert isinstance(on_bad_steps(RunControl(), BadSteps(31, 33, 3), [0], off), Stop)


def test_a_rollback_ends_at_a_change_of_the_batch_size():
    decisions, config = RunControl(batch_sizes=((0, 0, 8), (28, 28, 16))), small_config(**GUARDED)
    for saved in ([0, 20, 28], [0, 20, 28, 30]):
        assert on_bad_steps(decisions, BadSteps(31, 33, 3), saved, config) == Rollback(28, 28, 33)
    assert on_bad_steps(RunControl(), BadSteps(31, 33, 3), [0, 20, 28], config) == Rollback(20, 25, 33)
    assert rolled_back(RunControl(), decisions, (), config.guard).batch_sizes == decisions.batch_sizes


def test_after_a_rollback():
    line = {'num_steps': 70, 'planned_step': 30, 'planned_share': 0.25, 'warmup_share': 0.125}
    restored = RunControl(hours=2.0, best_validation_loss=3.5, evaluations_without_progress=1, step_seconds=9.0, **line)
    # A later decision for a step that the run does not reach any more.
    now = RunControl(rollbacks=1, rate_factor=0.5, hours=3.0, evaluations_without_progress=4, step_seconds=8.0)
    now = now._replace(num_steps=60, planned_step=50, planned_share=0.75, warmup_share=0.5)
    guard = small_config(guard__rollback_lr_factor=0.5).guard
    assert rolled_back(now, restored, ((4, 6),), guard) == RunControl(
        skips=((4, 6),),
        rollbacks=2,
        rate_factor=0.25,
        hours=3.0,
        best_validation_loss=3.5,
        evaluations_without_progress=1,
        step_seconds=8.0,
        **line,
    )
    assert rolled_back(now, restored, (), small_config().guard).rate_factor == 0.5


def test_the_config_includes_decisions():
    rates = {'optimizer__min_learning_rate': 1e-3, 'optimizer__embedding_learning_rate': 0.1}
    config = small_config(optimizer__name='muon', train__num_steps=0, train__hours=1.0, **rates)
    assert apply_control(config, RunControl()) == config
    after = apply_control(config, RunControl(rate_factor=0.5, num_steps=33))
    assert after.train.num_steps == 33
    # Only learning rates affect the compiled step, and num_steps is only decided for budgets.
    assert with_rates(config, RunControl(num_steps=33)) == config
    assert apply_control(small_config(), RunControl(num_steps=33)) == small_config()
    rates = ('learning_rate', 'min_learning_rate', 'embedding_learning_rate', 'adam_learning_rate')
    assert [getattr(after.optimizer, name) for name in rates] == [0.5e-2, 0.5e-3, 0.05, 0.0]


@pytest.mark.parametrize(
    ('losses', 'patience', 'early_stopping_min_delta', 'stops_at'),
    [
        ([3, 2, 1, 0.5], 1, 0.0, None),
        ([3, 2, 2, 2], 2, 0.0, 4),
        ([3, 2, 2, 1.9, 2, 2], 2, 0.0, 6),
        ([3, 2.95, 2.91, 2.5], 2, 0.1, 3),
        # The sum of the improvements exceeds the minimum improvement.
        ([3, 2.95, 2.85, 2.8, 2.7], 2, 0.1, None),
        ([3, math.nan, math.inf], 2, 0.0, 3),
        ([math.nan, 3, 2], 2, 0.0, None),
        ([1, 2, 3, 4, 5], 0, 0.0, None),
    ],
)
def test_early_stopping(losses, patience, early_stopping_min_delta, stops_at):
    guard = small_config(
        guard__early_stopping_patience=patience,
        guard__early_stopping_min_delta=early_stopping_min_delta,
        eval__interval=1,
    ).guard
    decisions, stopped = RunControl(), None
    for number, loss in enumerate(losses, start=1):
        decisions = from_json(json.loads(json.dumps(to_json(after_evaluation(decisions, loss, guard)))))
        stop = stops_early(decisions, guard)
        if stop and stopped is None:
            stopped = number
            assert 'guard.early_stopping_patience' in stop.reason
    assert stopped == stops_at


PRICED = {'train__price_per_hour': 2.5}


@pytest.mark.parametrize(
    ('settings', 'hours', 'fraction', 'alert', 'used_up'),
    [
        ({'guard__max_hours': 2.0}, 1.5, 0.75, False, False),
        ({'guard__max_hours': 2.0}, 1.6, 0.8, True, False),
        ({'guard__max_hours': 2.0}, 2.0, 1.0, True, True),
        # Four devices cost ten dollars per hour.
        ({'guard__max_dollars': 20.0, **PRICED}, 1.0, 0.5, False, False),
        ({'guard__max_dollars': 20.0, **PRICED}, 2.5, 1.25, True, True),
        # The limit that is reached first counts.
        ({'guard__max_hours': 10.0, 'guard__max_dollars': 20.0, **PRICED}, 1.8, 0.9, True, False),
        ({'train__num_steps': 0, 'train__hours': 4.0}, 3.0, 0.75, False, False),
        ({'train__num_steps': 0, 'train__dollars': 10.0, **PRICED}, 1.0, 1.0, True, True),
    ],
)
def test_budgets(settings, hours, fraction, alert, used_up):
    config = small_config(**settings)
    # Two attempts, the second with half of the devices at half of the cost.
    decisions = spend(RunControl(), 1800 * hours, num_devices=6, price_per_hour=config.train.price_per_hour)
    decisions = spend(decisions, 1800 * hours, num_devices=2, price_per_hour=config.train.price_per_hour)
    budget = budget_spent(decisions, config)
    assert budget.fraction == pytest.approx(fraction)
    assert (budget.alert, budget.used_up) == (alert, used_up)
    name, _, value = budget.name.partition('=')
    assert settings[name.replace('.', '__')] == float(value)


def test_without_a_budget_there_is_none():
    assert budget_spent(RunControl(hours=1e6, dollars=1e6), small_config()) is None


def test_the_time_until_an_alert_or_the_limit():
    assert seconds_left(RunControl(hours=9.0), small_config(), 4) is None
    config = small_config(guard__max_hours=10.0, guard__max_dollars=100.0, **PRICED)
    # Four devices cost ten dollars per hour; both limits alert after eight hours.
    assert seconds_left(RunControl(hours=1.0, dollars=10.0), config, 4) == pytest.approx(7 * 3600)
    assert seconds_left(RunControl(hours=8.5, dollars=10.0), config, 4) == pytest.approx(1.5 * 3600)
    # The run used more devices before.
    assert seconds_left(RunControl(hours=1.0, dollars=70.0), config, 4) == pytest.approx(3600)
    assert seconds_left(RunControl(hours=11.0, dollars=170.0), config, 4) == 0


def test_completed_runs():
    config = small_config(train__num_steps=9, guard__max_hours=2.0, guard__early_stopping_patience=2, eval__interval=1)
    assert ended(config, RunControl(), 8) == ''
    assert ended(config, RunControl(), 9) == 'step 9 of 9 is done'
    hours = small_config(train__num_steps=0, train__hours=1.0)
    assert ended(hours, RunControl(num_steps=20), 19) == ''
    assert ended(hours, RunControl(num_steps=20), 20) == 'step 20 of 20 is done'
    assert 'guard.max_hours=2 is used up' in ended(config, RunControl(hours=2.0), 1)
    assert 'guard.early_stopping_patience' in ended(config, RunControl(evaluations_without_progress=2), 1)


def test_decisions_round_trip_through_json():
    for decisions in (
        RunControl(),
        RunControl(((3, 5), (9, 12)), 2, 0.25, 700, 1.5, 7.25, 1.25, 3.125, 4, 55, 0.5, 0.1, 3.0, 0.3),
        RunControl(batch_sizes=((0, 0, 8), (9, 11, 16))),
    ):
        assert from_json(json.loads(json.dumps(to_json(decisions)))) == decisions
    assert from_json(None) == RunControl()


class Loop:
    """A run without files. Checkpoints are states and JSON; batches of poisoned steps are not finite."""

    EVERY, POISON = 4, range(13, 16)

    def __init__(self):
        # Dropout checks that random numbers depend on the step.
        model = {'model__num_layers': 1, 'model__dim': 16, 'model__num_heads': 2, 'model__dropout': 0.1}
        self.config = small_config(**{**GUARDED, 'guard__rollback_skip_steps': 2}, **model, guard__spike_window=16)
        self.layout = small_layout(self.config)
        self.step = jax.jit(make_train_step(self.config, self.layout))

    def batch(self, number):
        batch = small_batch(self.config, seed=number)
        if number in self.POISON:
            batch['weights'][:] = np.nan
        return self.layout.put_batch(batch, self.config.train.global_batch_size)

    def run(self, start, decisions, *, guarded=True, max_attempts=99):
        """Runs from a saved (state, JSON) to the end with all rollbacks, or for at most `max_attempts` attempts."""
        saved, losses = {int(start.step): (start, json.dumps(to_json(decisions)))}, {}
        state, bad = start, BadSteps()
        while int(state.step) < self.config.train.num_steps:
            number = int(state.step)
            state, metrics = self.step(state, self.batch(data_index(number, decisions.skips)))
            losses[number + 1] = float(metrics['loss'])
            bad = BadSteps(bad.first or number + 1, number + 1, bad.in_a_row + 1) if metrics['skipped'] else BadSteps()
            plan = on_bad_steps(decisions, bad, list(saved), self.config) if guarded else None
            assert not isinstance(plan, Stop), plan
            if plan:
                state, restored = saved[plan.step][0], from_json(json.loads(saved[plan.step][1]))
                saved = {step: kept for step, kept in saved.items() if step <= plan.step}
                skips = skip_steps(decisions.skips, plan.skip_from, plan.skip_to)
                decisions, bad = rolled_back(decisions, restored, skips, self.config.guard), BadSteps()
                max_attempts -= 1
                if not max_attempts:
                    # The attempt is killed before it saves a checkpoint.
                    return saved[plan.step]
            elif int(state.step) % self.EVERY == 0 and not bad.in_a_row:
                saved[int(state.step)] = (state, json.dumps(to_json(decisions)))
        return state, decisions, losses


def test_a_rollback_equals_a_run_without_the_skipped_steps():
    loop = Loop()
    first = small_state(loop.config, loop.layout)
    state, decisions, losses = loop.run(first, RunControl())
    # Steps 14, 15 and 16 were bad; two steps before them are skipped too.
    assert decisions.rollbacks == 1
    assert decisions.skips == ((11, 16),)
    assert int(state.skipped) == 0
    never, same, expected = loop.run(first, RunControl(skips=decisions.skips))
    assert (same.rollbacks, int(never.skipped)) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, state, never)
    np.testing.assert_array_equal([*losses.values()], [*expected.values()])
    # If the run is killed right after the rollback, it makes the same decisions again.
    kept, text = loop.run(first, RunControl(), max_attempts=1)
    again, same, _ = loop.run(kept, from_json(json.loads(text)))
    assert same == decisions
    jax.tree.map(np.testing.assert_array_equal, again, state)
    # Negative control: skipping the steps without rollback gives another result.
    other, _, _ = loop.run(first, RunControl(), guarded=False)
    assert int(other.skipped) == 3
    assert not np.array_equal(other.params['embedding'], state.params['embedding'])
