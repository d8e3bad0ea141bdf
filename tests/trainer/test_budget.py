"""Spending of a run, which is measured infrequently, and the number of steps that a budget determines."""

import itertools
import math
import random

import pytest

from maxlm.trainer.budget import RunBudget
from maxlm.training.run_control import RunControl, budget_spent, ended
from maxlm.training.run_length import progress_of
from tests.small import small_config


class Run:
    """A process with a simulated clock; it starts for half an hour, then each step takes one second."""

    STARTING = 1800.0

    def __init__(self, *, evaluation_share=0.0, agree=None, slow=1.0, **settings):
        self.config = small_config(train__price_per_hour=2.0, **settings)
        self.now = 100.0
        self.steps, self.seconds, self.pauses = 0, 0.0, {}
        self.slow = slow
        self.asked = 0
        self.spending = RunBudget(
            self.config,
            began=self.now,
            throughput=self,
            num_devices=4,
            evaluation_share=evaluation_share,
            clock=lambda: self.now,
            agree=agree or self.ask,
        )
        self.now += self.STARTING

    def ask(self, values):
        self.asked += 1
        return values

    def go(self, steps, decisions=None, *, start=0, looks=()):
        """Trains up to a step or until the budget is used up. Returns the reached step and the decisions."""
        self.spending.begin(start)
        decisions = decisions or RunControl()
        for step in range(start + 1, start + steps + 1):
            # The first steps of an attempt are slow.
            took = self.slow if step - start > 5 else 10 * self.slow
            self.now += took
            self.steps, self.seconds = self.steps + 1, self.seconds + took
            decisions = self.spending.after(step, decisions, look=step in looks)
            budget = budget_spent(decisions, self.config)
            if budget and budget.used_up:
                break
        return step, decisions


def test_startup_and_all_steps_cost():
    run = Run()
    _, decisions = run.go(100, looks=(40, 100))
    assert decisions.hours == pytest.approx((run.STARTING + 50 + 95) / 3600)
    assert decisions.dollars == pytest.approx(4 * 2.0 * decisions.hours)
    assert decisions.step_hours == pytest.approx((50 + 95) / 3600)
    # Without a budget, the clock is only read at the given steps.
    assert run.asked == 2
    # The next segment adds its time once.
    assert run.go(10, decisions, start=50, looks=(60,))[1].hours == pytest.approx(decisions.hours + 55 / 3600)


def test_budget_is_met_with_few_clock_reads():
    run = Run(guard__max_hours=2.0)
    step, decisions = run.go(10_000)
    # Half an hour was spent on starting.
    assert 2.0 <= decisions.hours < 2.0 + 2 / 3600
    assert step == pytest.approx(5400 - 45, abs=2)
    assert 2 < run.asked < 60
    # A decrease of the throughput during the run is detected.
    run = Run(guard__max_dollars=16.0)
    _, decisions = run.go(1000)
    run.slow = 4.0
    _, decisions = run.go(10_000, decisions, start=1000)
    assert 2.0 <= decisions.hours < 2.0 + 90 / 3600


@pytest.mark.parametrize('evaluation_share', [0.0, 0.25])
def test_first_length_is_computed_from_measured_steps(evaluation_share):
    settings = {'train__num_steps': 0, 'train__hours': 2.0, 'eval__interval': 40, 'checkpoint__save_interval_steps': 0}
    run = Run(evaluation_share=evaluation_share, **settings)
    assert run.go(24)[1].num_steps == 0
    run = Run(evaluation_share=evaluation_share, **settings)
    _, decisions = run.go(25)
    # 99 % of the budget minus the start, five slow steps and twenty normal steps.
    left = 0.99 * 7200 - 1800 - 50 - 20
    assert decisions.num_steps == pytest.approx(25 + left / (1 + evaluation_share), abs=10)
    assert decisions.planned_step == 25
    assert run.go(10, decisions, start=25)[1].num_steps == decisions.num_steps


class Attempts:
    """A run with a budget of one hour that is restarted after each kill; steps take `step_seconds(time spent)`."""

    EVALUATION, SAVE, STARTING = 30.0, 4.0, 20.0

    def __init__(self, step_seconds, *, noise=0.0, killed=()):
        settings = {'eval__interval': 100, 'checkpoint__save_interval_steps': 50, 'optimizer__warmup_steps': 10}
        self.config = small_config(train__num_steps=0, train__hours=1.0, **settings)
        self.step_seconds, self.noise, self.random = step_seconds, noise, random.Random(0)
        # `now` is the time spent, `shares` the progress after each step.
        self.now, self.step, self.shares, self.asked = 0.0, 0, {}, 0
        self.saved, self.decisions, self.ended = (0, RunControl()), RunControl(), ''
        for at in (*killed, math.inf):
            self.step, self.decisions = self.saved
            self.attempt(at)

    def ask(self, values):
        self.asked += 1
        return values

    def attempt(self, killed):
        self.steps, self.seconds, self.pauses = 0, 0.0, {}
        spending = RunBudget(
            self.config,
            # Time that a killed attempt had not saved counts too.
            began=3600 * self.decisions.hours,
            throughput=self,
            num_devices=4,
            evaluation_share=self.EVALUATION / (100 * self.step_seconds(0)),
            save_seconds=lambda: 2 * self.pauses.get('save', 0.0),
            clock=lambda: self.now,
            agree=self.ask,
        )
        spending.begin(self.step)
        self.now += self.STARTING
        while not self.ended and self.now < killed:
            took = self.step_seconds(self.now) * self.random.uniform(1 - self.noise, 1 + self.noise)
            took *= 1 if self.steps >= 5 else 2
            self.step, self.now = self.step + 1, self.now + took
            self.steps, self.seconds = self.steps + 1, self.seconds + took
            evaluates = self.step % 100 == 0 or self.step == self.decisions.num_steps
            if evaluates:
                self.now, self.pauses['eval'] = self.now + self.EVALUATION, self.EVALUATION
            self.shares[self.step] = progress_of(self.decisions, self.config).at(self.step)
            self.decisions = spending.after(self.step, self.decisions, look=evaluates)
            self.ended = ended(self.config, self.decisions, self.step)
            if self.step % 50 == 0 or self.ended:
                self.now, self.pauses['save'] = self.now + self.SAVE, self.SAVE
                self.saved = self.step, self.decisions


@pytest.mark.parametrize('noise', [0.0, 0.3])
@pytest.mark.parametrize('factor', [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ('changes', 'killed'), [(30, ()), (1080, ()), (2520, ()), (3420, ()), (1800, (900, 2000)), (1080, (3300,))]
)
def test_schedule_ends_with_its_budget_at_any_speed(changes, killed, factor, noise):
    run = Attempts(lambda now: 4.0 if now < changes else 4.0 * factor, noise=noise, killed=killed)
    assert run.ended == f'step {run.step} of {run.decisions.num_steps} is done'
    assert run.shares[run.step] == 1
    # The time includes the last evaluation, the last checkpoint and the work of killed attempts.
    assert 0.98 * 3600 <= run.now <= 3600
    if not killed:
        shares = [*run.shares.values()]
        # After a change of speed, progress never jumps to compensate for half of the steps.
        assert all(0 <= after - before < 0.01 for before, after in itertools.pairwise(shares))
        assert run.asked < 400


def test_varying_speed_and_long_steps():
    run = Attempts(lambda now: 8.0 if int(now / 360) % 2 else 4.0, noise=0.1)
    assert (run.shares[run.step], run.now) == (1, pytest.approx(3564, abs=36))
    run = Attempts(lambda now: 60.0)
    assert (run.shares[run.step], run.now) == (1, pytest.approx(3564, abs=60))
    # Negative control: a length that is fixed after the first steps ends at a different time.
    run = Attempts(lambda now: 4.0)
    assert run.step * 8.0 > 1.7 * 3600


def test_all_processes_use_the_measurements_of_the_first():
    heard = []
    first = Run(agree=lambda values: heard.append(values) or values, train__num_steps=0, train__hours=2.0)
    other = Run(agree=lambda values: heard.pop(0), slow=1.5, train__num_steps=0, train__hours=2.0)
    for run in (first, other):
        run.result = run.go(25)[1]
        run.slow = 5.0 if run is first else 0.5
    assert first.result == other.result
    # Decisions after a change of speed are equal too.
    for run in (first, other):
        run.later = run.go(200, run.result, start=25)[1]
    assert first.later == other.later
    assert first.later.num_steps < first.result.num_steps
    # Negative control: with its own clock, the other process decides differently.
    alone = Run(slow=1.5, train__num_steps=0, train__hours=2.0)
    assert alone.go(25)[1].num_steps != first.result.num_steps
