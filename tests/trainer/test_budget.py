"""Tests the measurement of time and cost, and the number of steps that a budget determines."""

import itertools
import math
import random

import pytest

from maxlm.trainer.budget import RunBudget
from maxlm.training.decisions.run_control import RunControl, budget_spent, ended
from maxlm.training.decisions.run_length import progress_of
from tests.small import small_config


class Run:
    """A process with a simulated clock. Startup takes half an hour, then each step takes one second."""

    STARTUP = 1800.0

    def __init__(self, *, evaluation_fraction=0.0, agree=None, slow=1.0, **settings):
        self.config = small_config(train__price_per_hour=2.0, **settings)
        self.now = 100.0
        self.steps, self.seconds, self.pauses = 0, 0.0, {}
        self.slow = slow
        self.num_broadcasts = 0
        self.run_budget = RunBudget(
            self.config,
            began=self.now,
            throughput=self,
            num_devices=4,
            evaluation_fraction=evaluation_fraction,
            clock=lambda: self.now,
            agree=agree or self.broadcast,
        )
        self.now += self.STARTUP

    def broadcast(self, values):
        self.num_broadcasts += 1
        return values

    def train(self, steps, decisions=None, *, start=0, read_at=()):
        """Trains `steps` steps, or until the budget is used up. Returns the reached step and the decisions."""
        self.run_budget.begin(start)
        decisions = decisions or RunControl()
        for step in range(start + 1, start + steps + 1):
            # The first steps of an attempt are slow.
            duration = self.slow if step - start > 5 else 10 * self.slow
            self.now += duration
            self.steps, self.seconds = self.steps + 1, self.seconds + duration
            decisions = self.run_budget.after(step, decisions, look=step in read_at)
            budget = budget_spent(decisions, self.config)
            if budget and budget.used_up:
                break
        return step, decisions


def test_startup_and_all_steps_cost():
    run = Run()
    _, decisions = run.train(100, read_at=(40, 100))
    assert decisions.hours == pytest.approx((run.STARTUP + 50 + 95) / 3600)
    assert decisions.dollars == pytest.approx(4 * 2.0 * decisions.hours)
    assert decisions.step_hours == pytest.approx((50 + 95) / 3600)
    # Without a budget, the clock is only read at the given steps.
    assert run.num_broadcasts == 2
    # A second call adds only its own time.
    assert run.train(10, decisions, start=50, read_at=(60,))[1].hours == pytest.approx(decisions.hours + 55 / 3600)


def test_budget_is_met_with_few_clock_reads():
    run = Run(guard__max_hours=2.0)
    step, decisions = run.train(10_000)
    # Startup took half an hour.
    assert 2.0 <= decisions.hours < 2.0 + 2 / 3600
    assert step == pytest.approx(5400 - 45, abs=2)
    assert 2 < run.num_broadcasts < 60
    # The budget is also met if the steps become slower during the run.
    run = Run(guard__max_dollars=16.0)
    _, decisions = run.train(1000)
    run.slow = 4.0
    _, decisions = run.train(10_000, decisions, start=1000)
    assert 2.0 <= decisions.hours < 2.0 + 90 / 3600


@pytest.mark.parametrize('evaluation_fraction', [0.0, 0.25])
def test_first_length_is_computed_from_measured_steps(evaluation_fraction):
    settings = {'train__num_steps': 0, 'train__hours': 2.0, 'eval__interval': 40, 'checkpoint__save_interval_steps': 0}
    run = Run(evaluation_fraction=evaluation_fraction, **settings)
    assert run.train(24)[1].num_steps == 0
    run = Run(evaluation_fraction=evaluation_fraction, **settings)
    _, decisions = run.train(25)
    # The planned time is 99 % of the budget minus startup, five slow steps and twenty normal steps.
    left = 0.99 * 7200 - 1800 - 50 - 20
    assert decisions.num_steps == pytest.approx(25 + left / (1 + evaluation_fraction), abs=10)
    assert decisions.planned_step == 25
    assert run.train(10, decisions, start=25)[1].num_steps == decisions.num_steps


class Attempts:
    """A run with a budget of one hour that is restarted after each kill; a step takes `step_seconds(now)` seconds."""

    EVALUATION, SAVE, STARTUP = 30.0, 4.0, 20.0

    def __init__(self, step_seconds, *, noise=0.0, killed=()):
        settings = {'eval__interval': 100, 'checkpoint__save_interval_steps': 50, 'optimizer__warmup_steps': 10}
        self.config = small_config(train__num_steps=0, train__hours=1.0, **settings)
        self.step_seconds, self.noise, self.random = step_seconds, noise, random.Random(0)
        # `now` is the time spent, `progress` the share of the schedule after each step.
        self.now, self.step, self.progress, self.num_broadcasts = 0.0, 0, {}, 0
        self.saved, self.decisions, self.ended = (0, RunControl()), RunControl(), ''
        for at in (*killed, math.inf):
            self.step, self.decisions = self.saved
            self.attempt(at)

    def broadcast(self, values):
        self.num_broadcasts += 1
        return values

    def attempt(self, killed):
        self.steps, self.seconds, self.pauses = 0, 0.0, {}
        run_budget = RunBudget(
            self.config,
            # The time of a killed attempt after its last checkpoint counts too.
            began=3600 * self.decisions.hours,
            throughput=self,
            num_devices=4,
            evaluation_fraction=self.EVALUATION / (100 * self.step_seconds(0)),
            save_seconds=lambda: 2 * self.pauses.get('save', 0.0),
            clock=lambda: self.now,
            agree=self.broadcast,
        )
        run_budget.begin(self.step)
        self.now += self.STARTUP
        while not self.ended and self.now < killed:
            duration = self.step_seconds(self.now) * self.random.uniform(1 - self.noise, 1 + self.noise)
            duration *= 1 if self.steps >= 5 else 2
            self.step, self.now = self.step + 1, self.now + duration
            self.steps, self.seconds = self.steps + 1, self.seconds + duration
            evaluates = self.step % 100 == 0 or self.step == self.decisions.num_steps
            if evaluates:
                self.now, self.pauses['eval'] = self.now + self.EVALUATION, self.EVALUATION
            self.progress[self.step] = progress_of(self.decisions, self.config).at(self.step)
            self.decisions = run_budget.after(self.step, self.decisions, look=evaluates)
            self.ended = ended(self.config, self.decisions, self.step)
            if self.step % 50 == 0 or self.ended:
                self.now, self.pauses['save'] = self.now + self.SAVE, self.SAVE
                self.saved = self.step, self.decisions


@pytest.mark.parametrize('noise', [0.0, 0.3])
@pytest.mark.parametrize('factor', [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ('changes_at', 'killed'), [(30, ()), (1080, ()), (2520, ()), (3420, ()), (1800, (900, 2000)), (1080, (3300,))]
)
def test_schedule_ends_with_its_budget_at_any_speed(changes_at, killed, factor, noise):
    run = Attempts(lambda now: 4.0 if now < changes_at else 4.0 * factor, noise=noise, killed=killed)
    assert run.ended == f'step {run.step} of {run.decisions.num_steps} is done'
    assert run.progress[run.step] == 1
    # The time includes the last evaluation, the last checkpoint and the time of killed attempts.
    assert 0.98 * 3600 <= run.now <= 3600
    if not killed:
        progress = [*run.progress.values()]
        # Progress never jumps after a change of speed.
        assert all(0 <= after - before < 0.01 for before, after in itertools.pairwise(progress))
        assert run.num_broadcasts < 400


def test_varying_speed_and_long_steps():
    run = Attempts(lambda now: 8.0 if int(now / 360) % 2 else 4.0, noise=0.1)
    assert (run.progress[run.step], run.now) == (1, pytest.approx(3564, abs=36))
    run = Attempts(lambda now: 60.0)
    assert (run.progress[run.step], run.now) == (1, pytest.approx(3564, abs=60))
    # Negative control: a length that is fixed after the first steps ends at a different time.
    run = Attempts(lambda now: 4.0)
    assert run.step * 8.0 > 1.7 * 3600


def test_all_processes_use_the_measurements_of_the_first():
    values_sent = []
    first = Run(agree=lambda values: values_sent.append(values) or values, train__num_steps=0, train__hours=2.0)
    other = Run(agree=lambda values: values_sent.pop(0), slow=1.5, train__num_steps=0, train__hours=2.0)
    for run in (first, other):
        run.result = run.train(25)[1]
        run.slow = 5.0 if run is first else 0.5
    assert first.result == other.result
    # Decisions after a change of speed are also equal.
    for run in (first, other):
        run.later = run.train(200, run.result, start=25)[1]
    assert first.later == other.later
    assert first.later.num_steps < first.result.num_steps
    # Negative control: with its own clock, the other process decides differently.
    independent = Run(slow=1.5, train__num_steps=0, train__hours=2.0)
    assert independent.train(25)[1].num_steps != first.result.num_steps
