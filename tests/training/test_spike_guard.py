"""Detection of spikes and values that are not finite: skipped steps leave no trace, and no false alarms."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.optimizer import GuardConfig
from maxlm.config.validation import MIN_SPIKE_WINDOW
from maxlm.training import spike_guard
from maxlm.training.spike_guard import SpikeStatistics, first_spike_window, spike_window_from_json, spike_window_to_json
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.conftest import ROOT
from tests.small import small_batch, small_config, small_layout, small_state

W = 16
GUARD = GuardConfig(spike_window=W)
check = jax.jit(spike_guard.check_spike, static_argnames='config')


def filled_window(losses, norms, config=GUARD):
    window = first_spike_window(config)
    for loss, norm in zip(losses, norms, strict=True):
        ok, window = check(window, jnp.float32(loss), jnp.float32(norm), config)
        assert ok
    return window


@pytest.fixture(scope='module')
def usual():
    """Returns the statistics of W good steps with losses of 2.9 to 3.1 and norms of 0.9 to 1.1."""
    rng = np.random.default_rng(0)
    return filled_window(rng.uniform(2.9, 3.1, W), rng.uniform(0.9, 1.1, W))


@pytest.mark.parametrize(
    ('loss', 'norm', 'good'),
    [
        (3.0, 1.0, True),
        (3.2, 1.0, True),
        (3.0, 2.0, True),
        # A low value is no spike.
        (0.1, 1.0, True),
        (3.0, 0.0, True),
        (6.0, 1.0, False),
        (3.0, 20.0, False),
        (np.nan, 1.0, False),
        (3.0, np.nan, False),
        (np.inf, 1.0, False),
        (3.0, np.inf, False),
        (-np.inf, 1.0, False),
    ],
)
def test_only_good_steps_enter_the_window(usual, loss, norm, good):
    ok, after = check(usual, jnp.float32(loss), jnp.float32(norm), GUARD)
    assert bool(ok) == good
    assert np.isfinite(after.good_QW).all()
    assert int(after.filled) == W
    if good and norm:
        np.testing.assert_array_equal(after.good_QW[:, :-1], usual.good_QW[:, 1:])
        assert after.good_QW[0, -1] == np.float32(loss)
    else:
        np.testing.assert_array_equal(after.good_QW, usual.good_QW)


def test_nothing_is_a_spike_before_sixteen_good_steps():
    window = filled_window([3.0] * (W - 1), [1.0] * (W - 1))
    assert int(window.filled) == W - 1
    ok, _ = check(window, jnp.float32(99), jnp.float32(99), GUARD)
    assert ok
    assert not check(window, jnp.float32(np.nan), jnp.float32(1), GUARD)[0]
    # Negative control: after one more step, the value is a spike.
    _, window = check(window, jnp.float32(3), jnp.float32(1), GUARD)
    assert not check(window, jnp.float32(99), jnp.float32(1), GUARD)[0]


LONG = GuardConfig(spike_window=128)


def test_steps_without_a_gradient_do_not_enter_the_window():
    """Otherwise the first gradient after batches without targets would be a spike."""
    window = filled_window(np.zeros(2 * W), np.zeros(2 * W), LONG)
    assert int(window.filled) == 0
    assert check(window, jnp.float32(3), jnp.float32(1), LONG)[0]
    # Negative control: after small gradients, it is a spike.
    window = filled_window(np.zeros(2 * W), np.full(2 * W, 1e-9), LONG)
    assert not check(window, jnp.float32(3), jnp.float32(1), LONG)[0]


@pytest.fixture(scope='module')
def young():
    """Returns the window of 128 after 40 good steps, whose losses fell from 8 to 3."""
    losses = np.concatenate([np.linspace(8, 3, 20), np.random.default_rng(0).uniform(2.9, 3.1, 20)])
    return filled_window(losses, np.ones(40), LONG)


def test_a_young_window_uses_its_newest_steps(young):
    assert young.filled >= MIN_SPIKE_WINDOW
    # 4.5 is below the first losses, but far above the newest ones.
    after = {loss: check(young, jnp.float32(loss), jnp.float32(1), LONG) for loss in (3.3, 4.5)}
    assert {loss: bool(ok) for loss, (ok, _) in after.items()} == {3.3: True, 4.5: False}
    # Negative control: the limit of all 40 steps, as of a full window, is above 4.5.
    full = SpikeStatistics(young.good_QW[:, -40:], jnp.int32(40))
    assert check(full, jnp.float32(4.5), jnp.float32(1), GuardConfig(spike_window=40))[0]


def test_a_repeated_spike_is_accepted_in_a_young_run(young):
    """Parameters that are bad for each batch can only be repaired by an update."""
    window, seen = young, []
    for _ in range(3):
        ok, window = check(window, jnp.float32(9), jnp.float32(1), LONG)
        seen.append((bool(ok), int(window.filled)))
    assert seen == [(False, 20), (False, 10), (True, 11)]
    # Steps that are not finite are never accepted, and a full window remains as it is.
    ok, window = check(young, jnp.float32(np.nan), jnp.float32(1), LONG)
    assert (bool(ok), int(window.filled)) == (False, 40)
    full = filled_window(3 + 0.1 * np.sin(np.arange(128)), np.ones(128), LONG)
    for _ in range(30):
        ok, full = check(full, jnp.float32(9), jnp.float32(1), LONG)
        assert (bool(ok), int(full.filled)) == (False, 128)


def test_the_threshold_falls_to_that_of_the_full_window():
    """With noise of known deviation, the limits of windows with 16, 64 and 128 used steps are 18.75, 11.25 and 10."""
    noise = np.tile([-1.0, 1.0], 64)
    for filled, factor in ((16, 18.75), (32, 18.75), (127, 10 * (1 + 16 * (1 / 63 - 1 / 128))), (128, 10)):
        window = SpikeStatistics(jnp.stack([100 + noise, 0 * noise]).astype(jnp.float32), jnp.int32(filled))
        # The used steps of 127 are odd in number, so their median is one of the two values.
        median, deviation = (100, 1) if filled != 127 else (101, 0)
        limit = median + factor * max(spike_guard.NORMAL * deviation, spike_guard.LOSS_FRACTION * median)
        found = [bool(check(window, jnp.float32(limit + by), jnp.float32(1), LONG)[0]) for by in (-0.01, 0.01)]
        assert found == [True, False], filled


@pytest.mark.parametrize('noise', ['normal', 'laplace', 't6', 't4'])
def test_small_windows_raise_no_more_false_alarms(noise):
    """The rate of false alarms with 16 and 64 steps is at most that with 128, and higher without the correction."""
    rng = np.random.default_rng(0)
    draw = {
        'normal': rng.standard_normal,
        'laplace': lambda size: rng.laplace(size=size),
        't6': lambda size: rng.standard_t(6, size),
        't4': lambda size: rng.standard_t(4, size),
    }[noise]

    def exceedances(steps):
        # Robust standard deviations by which the next value is above the median of `steps` values.
        values = draw((20_000, steps + 1)).astype(np.float32)
        seen = values[:, :steps]
        median = np.median(seen, axis=1)
        return (values[:, steps] - median) / (spike_guard.NORMAL * np.median(np.abs(seen - median[:, None]), axis=1))

    # At a rate of 1 of 1000 the simulation is short, and the tails are comparable.
    limit = np.quantile(exceedances(128), 0.999)
    small = exceedances(16)
    corrected = 1 + spike_guard.SMALL * (1 / 16 - 1 / 128)
    assert np.mean(small > corrected * limit) <= 0.001
    assert np.mean(small > limit) > 0.001


def test_the_spike_recorded_on_a_gpu_is_found():
    """The bfloat16 run of benchmarks/results has a loss of 8.6 at step 29, the fp8 run has no spike."""
    for name, found in (('1b_h200', [29]), ('1b_fp8_h200', [])):
        losses = np.float32(json.loads((ROOT / f'benchmarks/results/{name}.json').read_text())['losses'])
        oks = check_curves(losses[None], np.ones_like(losses)[None], LONG)
        assert np.flatnonzero(~np.asarray(oks[0])).tolist() == found


def test_without_a_window_only_nonfinite_steps_are_skipped():
    off = GuardConfig(spike_window=0)
    assert first_spike_window(off) is None
    ok, window = check(None, jnp.float32(1e30), jnp.float32(1e30), off)
    assert ok
    assert window is None
    assert not check(None, jnp.float32(1), jnp.float32(np.nan), off)[0]


def test_the_limit_follows_the_config(usual):
    found = [
        bool(check(usual, jnp.float32(3.6), jnp.float32(1), dataclasses.replace(GUARD, spike_threshold=number))[0])
        for number in (2.0, 100.0)
    ]
    assert found == [False, True]


def test_a_constant_level_has_a_limit_too():
    window = filled_window([3.0] * W, [1.0] * W)
    for loss, norm, good in ((3.2, 1.0, True), (3.0, 2.0, True), (3.5, 1.0, False), (3.0, 3.0, False)):
        assert bool(check(window, jnp.float32(loss), jnp.float32(norm), GUARD)[0]) == good


@pytest.mark.parametrize('steps', [0, 5, W, W + 3])
def test_the_window_round_trips_through_json_bit_for_bit(steps):
    rng = np.random.default_rng(steps)
    window = first_spike_window(GUARD)
    for loss, norm in rng.uniform(2.9, 3.1, (steps, 2)):
        _, window = check(window, jnp.float32(loss), jnp.float32(norm), GUARD)
    text = json.dumps(spike_window_to_json(window))
    again = spike_window_from_json(json.loads(text), GUARD)
    jax.tree.map(np.testing.assert_array_equal, again, window)
    assert [leaf.dtype for leaf in again] == [leaf.dtype for leaf in window]
    assert int(again.filled) == min(steps, W)


def test_another_length_of_the_window_keeps_the_newest_steps(usual):
    stored = spike_window_to_json(usual)
    longer = spike_window_from_json(stored, GuardConfig(spike_window=2 * W))
    assert (longer.good_QW.shape, int(longer.filled)) == ((2, 2 * W), W)
    assert spike_window_to_json(longer) == stored
    shorter = spike_window_from_json({name: [*range(2 * W)] for name in stored}, GUARD)
    assert spike_window_to_json(shorter)['losses'] == [*range(W, 2 * W)]
    # The guard is disabled, or an older checkpoint has no window.
    assert spike_window_from_json(stored, GuardConfig(spike_window=0)) is None
    jax.tree.map(np.testing.assert_array_equal, spike_window_from_json(None, GUARD), first_spike_window(GUARD))


def curves(num_runs, steps, seed=0):
    """Returns realistic losses and gradient norms: a power law with warm-up and heavy-tailed noise."""
    rng = np.random.default_rng(seed)
    step = np.arange(1, steps + 1)
    noise = rng.standard_t(6, (num_runs, steps))
    losses = 2.5 + 8.5 * step**-0.4 + 0.06 * noise
    # Norms are large at first, with multiplicative noise.
    norms = (0.3 + 5 * step**-0.7) * np.exp(0.25 * rng.standard_t(8, (num_runs, steps)))
    return losses.astype(np.float32), norms.astype(np.float32)


@functools.partial(jax.jit, static_argnames='config')
def check_curves(losses, norms, config):
    def run(losses, norms):
        def step(window, values):
            ok, window = check(window, *values, config)
            return window, ok

        return jax.lax.scan(step, first_spike_window(config), (losses, norms))[1]

    return jax.vmap(run)(losses, norms)


@pytest.mark.parametrize(
    ('num_runs', 'steps', 'window'), [(6, 300, 64), pytest.param(12, 1500, 128, marks=pytest.mark.nightly)]
)
def test_usual_curves_raise_no_false_alarm(num_runs, steps, window):
    losses, norms = curves(num_runs, steps)
    # Negative control: exactly the planted spikes in the same curves are detected.
    rng = np.random.default_rng(1)
    planted = np.zeros(losses.shape, bool)
    # Spikes are planted after the first window, while the loss decreases slowly.
    planted[:, 200:] = rng.random((num_runs, steps - 200)) < 0.02
    by_loss = planted & (rng.random(losses.shape) < 0.5)
    spiked = losses + 2.0 * by_loss, norms * np.where(planted & ~by_loss, 100, 1).astype(np.float32)
    assert planted.sum() > 0.0128 * num_runs * (steps - 200)
    both = [np.concatenate(pair) for pair in zip((losses, norms), spiked, strict=True)]
    found = check_curves(*both, GuardConfig(spike_window=window))
    usual, with_spikes = np.asarray(found).reshape(2, num_runs, steps)
    assert usual.all()
    np.testing.assert_array_equal(with_spikes, ~planted)


class Run:
    """A compiled step trained on one batch, so that its loss is steady, with spike window and moving average."""

    def __init__(self):
        # float16 has the state with the most parts.
        settings = {'guard__spike_window': W, 'optimizer__ema_decay': 0.9, 'optimizer__schedule': 'constant'}
        self.config = small_config(model__dtype='float16', model__num_layers=1, optimizer__warmup_steps=0, **settings)
        self.layout = small_layout(self.config)
        self.step = jax.jit(make_train_step(self.config, self.layout))
        batch = small_batch(self.config)
        self.batch = self.put(batch)
        # Targets that contradict the learned ones.
        self.exploding = self.put({**batch, 'targets': (batch['targets'] + 7) % 61})
        self.not_a_number = self.put({**batch, 'weights': np.where(np.arange(16) == 3, np.nan, batch['weights'])})
        self.state, self.history = small_state(self.config, self.layout), []
        for _ in range(70):
            self.state, metrics = self.step(self.state, self.batch)
            self.history.append(jax.device_get(metrics))

    def put(self, batch):
        return self.layout.put_batch(
            {name: np.asarray(rows, np.float32 if name == 'weights' else rows.dtype) for name, rows in batch.items()},
            self.config.train.global_batch_size,
        )


@pytest.fixture(scope='module')
def learned():
    return Run()


def test_a_run_that_learns_raises_no_false_alarm(learned):
    assert int(learned.state.skipped) == 0
    assert learned.history[-1]['loss'] < 0.2 * learned.history[0]['loss']
    assert int(learned.state.spike_window.filled) == W


@pytest.mark.parametrize(('kind', 'spike'), [('not_a_number', False), ('exploding', True)])
def test_a_bad_batch_leaves_no_trace(learned, kind, spike):
    after, metrics = learned.step(learned.state, getattr(learned, kind))
    assert (bool(metrics['skipped']), bool(metrics['spike'])) == (True, spike)
    assert bool(np.isfinite(metrics['loss'])) == spike
    # The state is bit-identical except for the two counters.
    counters = {'step': learned.state.step, 'skipped': learned.state.skipped}
    jax.tree.map(np.testing.assert_array_equal, after._replace(**counters), learned.state)
    assert (int(after.step), int(after.skipped)) == (int(learned.state.step) + 1, 1)
    # The next step equals that of a run without the bad step.
    then, metrics = learned.step(after, learned.batch)
    expected, expected_metrics = learned.step(learned.state, learned.batch)
    assert int(then.step) == int(expected.step) + 1
    counters = {'step': expected.step, 'skipped': expected.skipped}
    jax.tree.map(np.testing.assert_array_equal, then._replace(**counters), expected)
    for name in ('loss', 'learning_rate', 'grad_norm'):
        assert metrics[name] == expected_metrics[name]
    # Negative control: an accepted step changes the entire state.
    assert not np.array_equal(expected.params['embedding'], learned.state.params['embedding'])
    assert not np.array_equal(expected.ema['embedding'], learned.state.ema['embedding'])
    assert not np.array_equal(expected.spike_window.good_QW, learned.state.spike_window.good_QW)
    assert int(expected.loss_scale.good_steps) == int(learned.state.loss_scale.good_steps) + 1


def test_the_exploding_batch_is_accepted_before_the_guard_detects_spikes(learned):
    spike_window = learned.state.spike_window
    filled = jax.device_put(np.asarray(spike_window.filled) - 1, spike_window.filled.sharding)
    early_state = learned.state._replace(spike_window=spike_window._replace(filled=filled))
    after, metrics = learned.step(early_state, learned.exploding)
    assert (bool(metrics['skipped']), bool(metrics['spike'])) == (False, False)
    assert metrics['window_steps'] < MIN_SPIKE_WINDOW
    assert [int(metrics['window_steps']) for metrics in learned.history].index(W) == W
    assert not np.array_equal(after.params['embedding'], learned.state.params['embedding'])


def test_the_window_is_the_same_on_all_devices():
    config = small_config(num_devices=8, guard__spike_window=W, model__vocab_size=64)
    spike_window = abstract_state(config, small_layout(config)).spike_window
    assert isinstance(spike_window, SpikeStatistics)
    for leaf, first in zip(spike_window, first_spike_window(config.guard), strict=True):
        assert (leaf.shape, leaf.dtype) == (first.shape, first.dtype)
        assert len(leaf.sharding.device_set) == 8
        assert leaf.sharding.is_fully_replicated
