"""Steps that are held: they leave the state unchanged, so that the step before them can be replayed."""

import jax
import numpy as np
import pytest

from maxlm.training.batch import HOLD
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state


class Step:
    """A compiled step whose state has all parts, with a good, a bad and an overflowing batch."""

    def __init__(self):
        self.config = small_config(
            model__dtype='float16',
            model__num_layers=1,
            guard__spike_window=16,
            optimizer__ema_decay=0.9,
            optimizer__warmup_steps=0,
        )
        self.layout = small_layout(self.config)
        self.program = jax.jit(make_train_step(self.config, self.layout))
        self.rows = small_batch(self.config)
        self.states = [small_state(self.config, self.layout)]
        for _ in range(3):
            self.states.append(self.run(self.states[-1])[0])

    def run(self, state, *, hold=False, weight=1.0):
        weights = np.where(np.arange(self.config.data.seq_len) == 3, weight, self.rows['weights'])
        batch = self.layout.put_batch({**self.rows, 'weights': weights.astype(np.float32)}, 8)
        return self.program(state, {**batch, HOLD: jax.device_put(np.bool_(hold), self.layout.named())})


@pytest.fixture(scope='module')
def step():
    return Step()


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def overflowing(state):
    """Returns the state with a loss scale whose gradients overflow."""
    scale = state.loss_scale.scale
    return state._replace(loss_scale=state.loss_scale._replace(scale=jax.device_put(np.float32(2**30), scale.sharding)))


@pytest.mark.parametrize(('weight', 'overflows'), [(1.0, False), (np.nan, False), (1.0, True)])
def test_a_held_step_changes_nothing(step, weight, overflows):
    before = overflowing(step.states[-1]) if overflows else step.states[-1]
    held, _ = step.run(before, hold=True, weight=weight)
    assert same(held, before)
    # Negative control: the same step changes the state if it is not held.
    after, metrics = step.run(before, weight=weight)
    assert not same(after, before)
    assert bool(metrics['skipped']) == (overflows or weight != 1)
    # An overflow is no reason for a replay.
    assert bool(metrics['bad']) == (weight != 1)


def test_a_step_is_the_same_after_it_was_held(step):
    held, _ = step.run(step.states[2], hold=True)
    assert same(step.run(held), step.run(step.states[2]))


def test_the_state_before_a_bad_step_follows_from_that_after_it(step):
    before = step.states[-1]
    after, _ = step.run(before, weight=np.nan)
    counters = {name: getattr(after, name) - 1 for name in ('step', 'skipped')}
    assert same(after._replace(**counters), before)
    # Negative control: not after a good step.
    after, _ = step.run(before)
    assert not same(after._replace(step=after.step - 1), before)
