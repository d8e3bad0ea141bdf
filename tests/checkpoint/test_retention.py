"""Save and retention policies: tables of decisions, and time-based saves of several processes."""

import dataclasses

import numpy as np
import pytest

from maxlm.checkpoint.retention import RetentionRules, SavePolicy, best_step, next_check, steps_to_resume
from maxlm.config.schema import CheckpointConfig, Config
from maxlm.training.decisions.run_control import BadSteps, Rollback, RunControl, on_bad_steps


class Run:
    """A process with a simulated clock and a record of its communication."""

    def __init__(self, *, offset=0.0, agree=None, **config):
        self.now = offset
        self.exchanges = []
        self.times = SavePolicy(
            CheckpointConfig(**{'save_interval_steps': 0, 'save_interval_minutes': 0.0, **config}),
            start=0,
            clock=lambda: self.now,
            agree=agree or self.exchange,
        )

    def exchange(self, values):
        self.exchanges.append(values)
        return values

    def saves(self, step_seconds, num_steps=2000):
        saved = []
        for step in range(1, num_steps + 1):
            self.now += step_seconds(step)
            if self.times.should_save(step, num_steps=num_steps):
                self.times.record_save(step)
                saved.append(step)
        return saved


@pytest.mark.parametrize(
    ('step', 'changes', 'seconds', 'due'),
    [
        (99, {}, 1e9, False),
        (100, {}, 1e9, True),
        (20, {'save_interval_steps': 10}, 0, True),
        (21, {'save_interval_steps': 10}, 0, False),
        (21, {'keep_period': 7}, 0, True),
        (22, {'keep_period': 7}, 0, False),
        (3, {'save_interval_minutes': 1.0}, 60.0, True),
        (3, {'save_interval_minutes': 1.0}, 59.9, False),
        (3, {'save_interval_minutes': 0.5}, 30.0, True),
        # Rules are independent of each other.
        (20, {'save_interval_steps': 10, 'save_interval_minutes': 1.0}, 0.0, True),
        (21, {'save_interval_steps': 10, 'save_interval_minutes': 1.0}, 61.0, True),
    ],
)
def test_steps_that_are_saved(step, changes, seconds, due):
    run = Run(**changes)
    run.now += seconds
    assert run.times.should_save(step, num_steps=100) is due


@pytest.mark.parametrize(
    ('seconds_left', 'step_seconds', 'look'),
    [(100.0, 1.0, 57), (3.0, 1.0, 8), (1.0, 1.0, 8), (-5.0, 1.0, 8), (100.0, 0.0, 8)],
)
def test_next_step_that_reads_the_clock(seconds_left, step_seconds, look):
    assert next_check(7, seconds_left=seconds_left, step_seconds=step_seconds) == look


def test_every_minute():
    run = Run(save_interval_minutes=1.0)
    assert run.saves(lambda step: 0.25, num_steps=1000) == [240, 480, 720, 960, 1000]
    assert len(run.exchanges) < 50
    # Negative control: step-based saves need no communication.
    by_steps = Run(save_interval_steps=400)
    assert by_steps.saves(lambda step: 0.25, num_steps=1000) == [400, 800, 1000]
    assert by_steps.exchanges == []


def test_halved_throughput_is_detected_in_time():
    run = Run(save_interval_minutes=1.0)
    saved = run.saves(lambda step: 0.25 if step < 100 else 0.5)
    # The throughput halves 25 s after the start of the first minute.
    assert saved[:2] == [pytest.approx(170, abs=2), pytest.approx(290, abs=3)]


def test_processes_with_different_clocks_save_the_same_steps():
    first = Run(save_interval_minutes=1.0)
    saved = first.saves(lambda step: 0.25)
    answers = iter(first.exchanges)
    other = Run(save_interval_minutes=1.0, offset=1e6, agree=lambda values: next(answers))
    assert other.saves(lambda step: 0.31) == saved
    # Both processes communicate equally often.
    assert next(answers, None) is None
    # Negative control: without communication, the process saves other steps.
    assert Run(save_interval_minutes=1.0).saves(lambda step: 0.31) != saved
    assert all(isinstance(values, np.ndarray) for values in first.exchanges)


LOSSES = {0: None, 10: 3.0, 20: 2.0, 30: 2.5, 40: None, 50: 2.0, 60: float('nan'), 70: 4.0}
NEWEST_FIRST = dict(reversed(LOSSES.items()))


@pytest.mark.parametrize(
    ('rules', 'kept'),
    [
        ((1, 0, 0), {70: ('last',)}),
        ((2, 0, 0), {60: ('last',), 70: ('last',)}),
        # The newest of equal losses is the best. A loss that is not finite is never the best.
        ((1, 1, 0), {50: ('best',), 70: ('last',)}),
        ((1, 3, 0), {20: ('best',), 30: ('best',), 50: ('best',), 70: ('last',)}),
        ((1, 0, 30), {30: ('permanent',), 60: ('permanent',), 70: ('last',)}),
        ((1, 5, 35), {10: ('best',), 20: ('best',), 30: ('best',), 50: ('best',), 70: ('last', 'best', 'permanent')}),
        ((99, 0, 0), {step: ('last',) for step in LOSSES}),
    ],
)
def test_steps_that_are_kept(rules, kept):
    reasons = RetentionRules(*rules).reasons(NEWEST_FIRST)
    assert list(reasons) == list(LOSSES)
    assert {step: why for step, why in reasons.items() if why} == kept


def test_the_best_step():
    assert best_step(LOSSES) == 50
    assert best_step({step: loss for step, loss in LOSSES.items() if step < 50}) == 20
    assert best_step({3: None, 4: float('inf')}) is None
    # NaN has no place in an order.
    assert best_step({1: 2.0, 2: float('nan'), 3: 1.0}) == 3


@pytest.mark.parametrize(
    ('max_bytes', 'reserved', 'deleted'),
    [
        # Step 10 has no reason to be kept. 50 is the best and 30 and 60 are permanent.
        (0, 999, [0, 10, 20]),
        (5, 0, [0, 10, 20]),
        (4, 0, [0, 10, 20, 40]),
        # The best checkpoint is deleted last, and the newest and permanent ones are never deleted.
        (3, 0, [0, 10, 20, 40, 50]),
        (5, 1, [0, 10, 20, 40]),
        (1, 0, [0, 10, 20, 40, 50]),
    ],
)
def test_steps_beyond_the_size_limit_are_deleted(max_bytes, reserved, deleted):
    rules = RetentionRules(4, keep_best=1, keep_period=30, max_bytes=max_bytes)
    assert rules.steps_to_delete(NEWEST_FIRST, dict.fromkeys(LOSSES, 1), reserved=reserved) == deleted
    # Sizes are those of the checkpoints: step 40 alone is enough.
    sizes = {**dict.fromkeys(LOSSES, 1), 40: 100}
    assert rules._replace(max_bytes=10).steps_to_delete(LOSSES, sizes) == [0, 10, 20, 40]


@pytest.mark.parametrize('skip', [0, 5, 20, 35, 1000])
def test_steps_to_resume_include_each_target_of_a_rollback(skip):
    guard = {'max_rollbacks': 2, 'rollback_skip_steps': skip}
    config = Config()
    config = dataclasses.replace(config, guard=dataclasses.replace(config.guard, **guard))
    steps = [10, 20, 30, 40]
    needed = steps_to_resume(steps, **guard)
    targets = set()
    for first in range(41, 100 + skip):
        bad = BadSteps(first, first + 30, config.guard.max_consecutive_skips)
        # The run resumed from step 40.
        rollback = on_bad_steps(RunControl(), bad, steps, config)
        assert isinstance(rollback, Rollback)
        targets.add(rollback.step)
    assert needed == targets
    assert steps_to_resume(steps, max_rollbacks=0, rollback_skip_steps=skip) == {40}
    assert steps_to_resume([], **guard) == set()
