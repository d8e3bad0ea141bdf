"""Tables of saving and retention decisions."""

import dataclasses

import pytest

from maxlm.config.schema import Config
from maxlm.training.decisions.run_control import BadSteps, Rollback, RunControl, on_bad_steps
from maxlm.training.retention import (
    SavedStep,
    best_step,
    next_check,
    retention_reasons,
    should_save,
    steps_to_delete,
    steps_to_resume,
)

NEVER = {'num_steps': 100, 'save_interval_steps': 0, 'keep_period': 0, 'seconds': 1e9, 'save_interval_minutes': 0.0}


@pytest.mark.parametrize(
    ('step', 'changes', 'due'),
    [
        (99, {}, False),
        (100, {}, True),
        (20, {'save_interval_steps': 10}, True),
        (21, {'save_interval_steps': 10}, False),
        (21, {'keep_period': 7}, True),
        (22, {'keep_period': 7}, False),
        (3, {'save_interval_minutes': 1.0, 'seconds': 60.0}, True),
        (3, {'save_interval_minutes': 1.0, 'seconds': 59.9}, False),
        (3, {'save_interval_minutes': 0.5, 'seconds': 30.0}, True),
        # Rules are independent of each other.
        (20, {'save_interval_steps': 10, 'save_interval_minutes': 1.0, 'seconds': 0.0}, True),
        (21, {'save_interval_steps': 10, 'save_interval_minutes': 1.0, 'seconds': 61.0}, True),
    ],
)
def test_steps_that_are_saved(step, changes, due):
    assert should_save(step, **{**NEVER, **changes}) is due


@pytest.mark.parametrize(
    ('seconds_left', 'step_seconds', 'look'),
    [(100.0, 1.0, 57), (3.0, 1.0, 8), (1.0, 1.0, 8), (-5.0, 1.0, 8), (100.0, 0.0, 8)],
)
def test_next_step_that_reads_the_clock(seconds_left, step_seconds, look):
    assert next_check(7, seconds_left=seconds_left, step_seconds=step_seconds) == look


LOSSES = {0: None, 10: 3.0, 20: 2.0, 30: 2.5, 40: None, 50: 2.0, 60: float('nan'), 70: 4.0}
SAVED = [SavedStep(step, loss) for step, loss in LOSSES.items()]


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
    max_to_keep, keep_best, keep_period = rules
    reasons = retention_reasons(reversed(SAVED), max_to_keep=max_to_keep, keep_best=keep_best, keep_period=keep_period)
    assert list(reasons) == list(LOSSES)
    assert {step: why for step, why in reasons.items() if why} == kept


def test_the_best_step():
    assert best_step(SAVED) == 50
    assert best_step(SAVED[:5]) == 20
    assert best_step([SavedStep(3), SavedStep(4, float('inf'))]) is None


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
    rules = {'max_to_keep': 4, 'keep_best': 1, 'keep_period': 30, 'max_bytes': max_bytes, 'reserved': reserved}
    assert steps_to_delete(reversed(SAVED), dict.fromkeys(LOSSES, 1), **rules) == deleted
    # Sizes are those of the checkpoints: step 40 alone is enough.
    sizes = {**dict.fromkeys(LOSSES, 1), 40: 100}
    assert steps_to_delete(SAVED, sizes, **{**rules, 'max_bytes': 10, 'reserved': 0}) == [0, 10, 20, 40]


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
