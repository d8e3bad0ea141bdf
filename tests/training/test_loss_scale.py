"""Training in float16: loss scale, overflowing steps, and the same learning as in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.training.loss_scale import LossScale, first_loss_scale
from maxlm.training.loss_scale import next_loss_scale as next_without_jit
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state

next_loss_scale = jax.jit(next_without_jit, static_argnums=2)

STEPS = 20
SETTINGS = {'train__initial_loss_scale': 1024.0, 'train__loss_scale_growth_interval': 100, 'optimizer__warmup_steps': 0}


class Run:
    """A compiled step with a batch and the initial state."""

    def __init__(self, dtype):
        self.config = small_config(model__dtype=dtype, model__num_layers=1, **SETTINGS)
        self.layout = small_layout(self.config)
        self.step = jax.jit(make_train_step(self.config, self.layout))
        self.state = small_state(self.config, self.layout)
        self.batch = self.layout.put_batch(small_batch(self.config), self.config.train.global_batch_size)

    def with_scale(self, scale, good_steps=0):
        """Returns the initial state with another loss scale."""
        placed = jax.device_put((jnp.float32(scale), jnp.int32(good_steps)), self.layout.named())
        return self.state._replace(loss_scale=LossScale(*placed))

    def losses(self):
        state, losses = self.state, []
        for _ in range(STEPS):
            state, metrics = self.step(state, self.batch)
            losses.append(float(metrics['loss']))
        assert int(state.skipped) == 0
        return np.array(losses)

    def gradient(self, scale=None):
        """Returns the clipped gradient, which is ten times the first moment after one step."""
        state, metrics = self.step(self.state if scale is None else self.with_scale(scale), self.batch)
        assert not metrics['skipped']
        moments = optax.tree.get(state.opt_state, 'mu')
        return np.concatenate([10 * np.ravel(moment) for moment in jax.tree.leaves(moments)])


@pytest.fixture(scope='module')
def half():
    return Run('float16')


@pytest.fixture(scope='module')
def single():
    return Run('float32')


def test_the_scale_halves_after_overflows_and_doubles_after_good_steps():
    config = small_config(train__initial_loss_scale=8.0, train__loss_scale_growth_interval=3).train
    state, seen = first_loss_scale(config), []
    for overflow in (False, False, True, False, False, False, False, True, True, False, False, False):
        state = next_loss_scale(state, jnp.bool(overflow), config)
        seen.append((float(state.scale), int(state.good_steps)))
    up_to_overflow = [(8, 1), (8, 2), (4, 0)]
    assert seen == [*up_to_overflow, (4, 1), (4, 2), (8, 0), (8, 1), (4, 0), (2, 0), (2, 1), (2, 2), (4, 0)]
    assert [leaf.dtype for leaf in state] == [jnp.float32, jnp.int32]


@pytest.mark.parametrize(
    ('scale', 'overflow', 'expected'),
    [(1.0, True, 1.0), (1.5, True, 1.0), (2.0, True, 1.0), (2.0**29, False, 2.0**30), (2.0**30, False, 2.0**30)],
)
def test_the_scale_has_bounds(scale, overflow, expected):
    config = small_config(train__initial_loss_scale=scale, train__loss_scale_growth_interval=1).train
    assert float(next_loss_scale(first_loss_scale(config), jnp.bool(overflow), config).scale) == expected


def test_an_overflow_changes_nothing_but_the_scale(half):
    state, metrics = half.step(half.state, half.batch)
    assert (bool(metrics['skipped']), bool(metrics['overflow'])) == (False, False)
    huge = state._replace(loss_scale=half.with_scale(2.0**30, good_steps=7).loss_scale)
    after, metrics = half.step(huge, half.batch)
    assert (bool(metrics['skipped']), bool(metrics['overflow'])) == (True, True)
    assert np.isfinite(metrics['loss'])
    assert float(metrics['loss_scale']) == 2.0**30
    assert (float(after.loss_scale.scale), int(after.loss_scale.good_steps)) == (2.0**29, 0)
    assert (int(after.step), int(after.skipped)) == (2, 1)
    for name in ('params', 'opt_state'):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    # With a sufficiently low scale, the next step is bit-identical to that of a run without overflow.
    then, metrics = half.step(after._replace(loss_scale=state.loss_scale), half.batch)
    expected, expected_metrics = half.step(state, half.batch)
    jax.tree.map(np.testing.assert_array_equal, (then.params, then.opt_state), (expected.params, expected.opt_state))
    assert metrics['learning_rate'] == expected_metrics['learning_rate']
    assert not np.array_equal(then.params['embedding'], after.params['embedding'])


def test_overflows_stop_after_the_scale_is_reduced(half):
    state, overflows = half.with_scale(2.0**30), []
    for _ in range(STEPS):
        state, metrics = half.step(state, half.batch)
        overflows.append(bool(metrics['overflow']))
    assert overflows[0]
    assert not all(overflows)
    assert int(state.skipped) == sum(overflows)
    assert float(state.loss_scale.scale) == 2.0 ** (30 - sum(overflows))
    assert int(state.loss_scale.good_steps) == overflows[::-1].index(True)


def test_good_steps_double_the_scale(half):
    state, _ = half.step(half.with_scale(512, good_steps=98), half.batch)
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (512, 99)
    state, metrics = half.step(state, half.batch)
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (1024, 0)
    # The step itself still used the previous scale.
    assert float(metrics['loss_scale']) == 512


def test_a_loss_that_is_not_finite_is_no_overflow(half):
    bad = {**half.batch, 'weights': half.batch['weights'].at[0, 0].set(jnp.nan)}
    after, metrics = half.step(half.state, bad)
    assert (bool(metrics['skipped']), bool(metrics['overflow'])) == (True, False)
    assert float(after.loss_scale.scale) == float(half.state.loss_scale.scale)
    jax.tree.map(np.testing.assert_array_equal, after.params, half.state.params)


def test_a_gradient_that_is_not_finite_without_a_scale_is_no_overflow(half):
    # The mean loss is unchanged, but its gradient exceeds float16.
    large_weights = {**half.batch, 'weights': half.batch['weights'] * 1e30}
    for scale, overflow in ((1, False), (2, True)):
        after, metrics = half.step(half.with_scale(scale), large_weights)
        assert (bool(metrics['skipped']), bool(metrics['overflow'])) == (True, overflow)
        assert np.isfinite(metrics['loss'])
        assert float(after.loss_scale.scale) == 1


def test_the_gradient_equals_float32_unless_the_scale_is_too_low(half, single):
    expected = single.gradient()
    size = np.linalg.norm(expected)
    error = {scale: np.linalg.norm(half.gradient(scale) - expected) / size for scale in (2.0**4, 2.0**10, 2.0**-10)}
    assert error[2.0**4] < 0.01
    assert error[2.0**10] < 0.01
    # Negative control: a small scale increases the error.
    assert error[2.0**-10] > 10 * error[2.0**10]


def test_float16_learns_as_float32_does(half, single):
    losses, expected = half.losses(), single.losses()
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert expected[-1] < 0.7 * expected[0]
    # Negative control: the dtypes differ.
    assert (losses != expected).all()


def test_other_types_have_no_scale(single):
    state, metrics = single.step(single.state, single.batch)
    assert state.loss_scale is None
    assert not {'loss_scale', 'overflow'} & metrics.keys()
