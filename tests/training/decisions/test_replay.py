"""Replayed steps: their selection, and the cause of a difference between two executions."""

import math

import numpy as np
import pytest

from maxlm.training.decisions.replay import ROUNDING, Cause, StepResult, find_cause, is_replayed

STEPS = range(1, 4001)


def chosen(fraction, seed=0):
    return {step for step in STEPS if is_replayed(step, fraction=fraction, seed=seed)}


def test_the_fraction_selects_steps():
    assert chosen(0.0) == set()
    assert chosen(1.0) == set(STEPS)
    for fraction in (0.0025, 0.1, 0.5):
        # Five standard deviations.
        expected = fraction * len(STEPS)
        assert abs(len(chosen(fraction)) - expected) < 5 * math.sqrt(expected)
    assert chosen(0.1) < chosen(0.5)
    # Resumed runs and all hosts choose the same steps, and other seeds choose others.
    assert chosen(0.1) == chosen(0.1)
    assert chosen(0.1) != chosen(0.1, seed=1)


def result(loss=3.0, grad_norm=1.0, param_norm=9.0, checksums=(1, 2)):
    return StepResult(loss, grad_norm, param_norm, np.array([checksums], np.uint32))


@pytest.mark.parametrize(
    ('other', 'deterministic', 'bfloat16', 'float32'),
    [
        ({}, 'data', 'data', 'data'),
        ({'checksums': (1, 3)}, 'device', 'nondeterminism', 'nondeterminism'),
        ({'loss': 3.0001}, 'device', 'nondeterminism', 'device'),
        ({'loss': 3.01}, 'device', 'device', 'device'),
        ({'grad_norm': 1.001}, 'device', 'nondeterminism', 'device'),
        ({'grad_norm': 1.1}, 'device', 'device', 'device'),
        ({'param_norm': 9.0001}, 'device', 'nondeterminism', 'device'),
        ({'param_norm': 9.1}, 'device', 'device', 'device'),
        ({'loss': math.nan}, 'device', 'device', 'device'),
        ({'grad_norm': math.inf}, 'device', 'device', 'device'),
    ],
)
def test_causes(other, deterministic, bfloat16, float32):
    for pair in ((result(), result(**other)), (result(**other), result())):
        assert find_cause(*pair, dtype='float32', is_deterministic=True) == deterministic
        for dtype, expected in (('bfloat16', bfloat16), ('float16', bfloat16), ('float32', float32)):
            assert find_cause(*pair, dtype=dtype, is_deterministic=False) == expected
    # Values that are not finite are equal to themselves.
    both = result(**other), result(**other)
    assert find_cause(*both, dtype='float32', is_deterministic=True) is Cause.DATA


def test_a_loss_that_changes_by_a_hundredth_exceeds_rounding():
    # The loss of a language model is at most about 12 nats, and usually 2 to 4.
    assert all(12 * limits.loss < 0.01 for limits in ROUNDING.values())
