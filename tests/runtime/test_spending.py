"""What a run has cost, looked at seldom; and its length in steps, once the pace is known."""

import pytest

from maxlm.runtime.spending import Spending
from maxlm.training.decisions import Decisions, budget_spent
from tests.small import small_config


class Run:
    """A process with a clock of its own, whose steps take a second each after half an hour of starting."""

    STARTING = 1800.0

    def __init__(self, *, evaluation_share=0.0, agree=None, slow=1.0, **settings):
        self.config = small_config(train__price_per_hour=2.0, **settings)
        self.now = 100.0
        self.steps, self.seconds = 0, 0.0
        self.slow = slow
        self.asked = 0
        self.spending = Spending(
            self.config,
            began=self.now,
            pace=self,
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
        """Trains up to a step, or until the budget is used up; returns where it came to and the decisions."""
        self.spending.begin(start)
        decisions = decisions or Decisions()
        for step in range(start + 1, start + steps + 1):
            # The first steps are slow.
            took = self.slow if step - start > 5 else 10 * self.slow
            self.now += took
            self.steps, self.seconds = self.steps + 1, self.seconds + took
            decisions = self.spending.after(step, decisions, look=step in looks)
            budget = budget_spent(decisions, self.config)
            if budget and budget.used_up:
                break
        return step, decisions


def test_starting_and_all_steps_cost():
    run = Run()
    _, decisions = run.go(100, looks=(40, 100))
    assert decisions.hours == pytest.approx((run.STARTING + 50 + 95) / 3600)
    assert decisions.dollars == pytest.approx(4 * 2.0 * decisions.hours)
    assert decisions.step_hours == pytest.approx((50 + 95) / 3600)
    # Without a budget nobody has to look in between.
    assert run.asked == 2
    # The next leg adds to it, and nothing twice.
    assert run.go(10, decisions, start=50, looks=(60,))[1].hours == pytest.approx(decisions.hours + 55 / 3600)


def test_a_budget_is_met_with_few_looks():
    run = Run(guard__max_hours=2.0)
    step, decisions = run.go(10_000)
    # Half an hour went into starting.
    assert 2.0 <= decisions.hours < 2.0 + 2 / 3600
    assert step == pytest.approx(5400 - 45, abs=2)
    assert 2 < run.asked < 60
    # A pace that becomes slower on the way is noticed.
    run = Run(guard__max_dollars=16.0)
    _, decisions = run.go(1000)
    run.slow = 4.0
    _, decisions = run.go(10_000, decisions, start=1000)
    assert 2.0 <= decisions.hours < 2.0 + 90 / 3600


@pytest.mark.parametrize(('evaluation_share', 'steps'), [(0.0, 5167), (0.25, 4134)])
def test_the_length_is_that_of_measured_steps(evaluation_share, steps):
    run = Run(evaluation_share=evaluation_share, train__num_steps=0, train__hours=2.0)
    assert run.go(24)[1].num_steps == 0
    run = Run(evaluation_share=evaluation_share, train__num_steps=0, train__hours=2.0)
    _, decisions = run.go(25)
    # 97 % of what is left after starting, five slow steps and twenty others.
    left = 0.97 * (7200 - 1800 - 50 - 20) / (1 + evaluation_share)
    assert decisions.num_steps == 25 + int(left)
    assert decisions.num_steps == pytest.approx(steps + 25, abs=30)
    assert run.go(10, decisions, start=25)[1].num_steps == decisions.num_steps


def test_all_processes_hear_what_the_first_measured():
    heard = []
    first = Run(agree=lambda values: heard.append(values) or values, train__num_steps=0, train__hours=2.0)
    other = Run(agree=lambda values: heard.pop(0), slow=1.5, train__num_steps=0, train__hours=2.0)
    for run in (first, other):
        run.result = run.go(25)[1]
    assert first.result == other.result
    # Control: by its own clock the other would decide otherwise.
    alone = Run(slow=1.5, train__num_steps=0, train__hours=2.0)
    assert alone.go(25)[1].num_steps != first.result.num_steps
