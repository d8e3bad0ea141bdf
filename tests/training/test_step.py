"""The training step: accumulation, clipping, skipping, dropout, z-loss, moving average."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.errors import InputError
from maxlm.training.state import TrainState, abstract_state, evaluated_params, init_state
from maxlm.training.step import make_eval_step, make_train_step
from tests.small import small_batch, small_config, small_layout, small_state

MODEL = {'model__num_layers': 1, 'model__dim': 16, 'model__num_heads': 2}
CLIP_NORM = 0.25
# Four micro-batches, clipped gradients, and a moving average.
SETTINGS = {'train__per_device_batch_size': 2, 'optimizer__max_grad_norm': CLIP_NORM, 'optimizer__ema_decay': 0.22}


class Step:
    """A compiled step of a one-layer model with its batch and initial state."""

    def __init__(self, **settings):
        self.config = small_config(**{**MODEL, **settings})
        self.layout = small_layout(self.config)
        self.run = jax.jit(make_train_step(self.config, self.layout))
        self.rows = small_batch(self.config)
        self.batch = self.with_weights(self.rows['weights'])
        self.first = small_state(self.config, self.layout)

    def with_weights(self, weights):
        """Returns the batch with other token weights."""
        return self.layout.put_batch({**self.rows, 'weights': weights}, self.config.train.global_batch_size)

    def states(self, num_steps):
        """Returns the states and metrics after each of the first steps on the same batch."""
        state, states, history = self.first, [], []
        for _ in range(num_steps):
            state, metrics = self.run(state, self.batch)
            states.append(state)
            history.append(jax.device_get(metrics))
        return states, history


class Runs(NamedTuple):
    """Steps that most tests share.

    Attributes:
        step: step with micro-batches, clipping and moving average.
        states: states after each of 40 steps.
        plain: step of one micro-batch without clipping and moving average.
    """

    step: Step
    states: list
    history: list
    plain: Step
    plain_state: TrainState
    plain_metrics: dict


@pytest.fixture(scope='module')
def runs():
    step, plain = Step(**SETTINGS), Step(optimizer__max_grad_norm=0.0)
    (state,), (metrics,) = plain.states(1)
    return Runs(step, *step.states(40), plain, state, metrics)


def mean_gradient(state):
    """Returns ten times the first moments, which is the optimizer's input gradient after the first step."""
    return jax.tree.map(lambda m: 10 * m, jax.device_get(optax.tree.get(state.opt_state, 'mu')))


def norm(tree):
    return np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(jax.device_get(tree))))


def assert_close(tree, other, rtol):
    """Compares arrays relative to their largest element, because single elements may be arbitrarily small."""
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-3))


def test_accumulation_is_exact_with_uneven_token_counts(runs):
    assert runs.step.config.accumulation == 4
    counts = [runs.step.rows['weights'][index::4].sum() for index in range(4)]
    assert len(set(map(float, counts))) > 1, 'micro-batches must differ, or a mean of means would pass'
    metrics, expected = runs.history[0], runs.plain_metrics
    np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)
    np.testing.assert_allclose(metrics['grad_norm'], expected['grad_norm'], rtol=1e-6)


def test_the_mean_of_means_differs(runs):
    """Negative control of the previous test: averages the means of each quarter of the rows."""
    plain, rows = runs.plain, np.arange(8)[:, None]
    quarters = [plain.with_weights(plain.rows['weights'] * np.float32(rows % 4 == quarter)) for quarter in range(4)]
    losses = [float(plain.run(plain.first, quarter)[1]['loss']) for quarter in quarters]
    assert abs(np.mean(losses) - runs.plain_metrics['loss']) > 1e-5


def test_clipping_bounds_the_norm_and_keeps_the_direction(runs):
    grad_norm = float(runs.plain_metrics['grad_norm'])
    assert grad_norm > 2 * CLIP_NORM
    clipped, free = mean_gradient(runs.states[0]), mean_gradient(runs.plain_state)
    np.testing.assert_allclose(norm(clipped), CLIP_NORM, rtol=1e-5)
    assert_close(clipped, jax.tree.map(lambda g: g * CLIP_NORM / grad_norm, free), 1e-5)
    np.testing.assert_allclose(norm(free), grad_norm, rtol=1e-5)


def test_small_gradients_are_not_clipped(runs):
    # The sum of the weights is at least 1 in the denominator, so small weights make a small gradient.
    step = runs.step
    light = step.rows['weights'] * np.float32(1e-4)
    state, metrics = step.run(step.first, step.with_weights(light))
    share = float(light.sum())
    assert 0 < float(metrics['grad_norm']) < CLIP_NORM
    np.testing.assert_allclose(metrics['grad_norm'], share * runs.plain_metrics['grad_norm'], rtol=1e-5)
    assert_close(mean_gradient(state), jax.tree.map(lambda g: g * share, mean_gradient(runs.plain_state)), 1e-5)


def test_metrics_describe_the_batch(runs):
    first, metrics = runs.states[0], runs.history[0]
    assert metrics['tokens'] == runs.step.rows['weights'].sum()
    assert abs(metrics['loss'] - np.log(61)) < 0.2
    np.testing.assert_allclose(metrics['param_norm'], norm(first.params), rtol=1e-5)
    assert not metrics['skipped']
    assert not metrics['spike']
    assert not {'z_loss', 'loss_scale', 'source_loss'} & metrics.keys()


def test_the_first_update_of_the_warmup_changes_parameters(runs):
    np.testing.assert_allclose(
        [metrics['learning_rate'] for metrics in runs.history[:3]], [0.5e-2, 1e-2, 1e-2], rtol=1e-6
    )
    first = runs.states[0]
    assert int(first.step) == 1
    assert not np.array_equal(first.params['embedding'], runs.step.first.params['embedding'])


def test_the_moving_average_starts_with_a_low_decay(runs):
    expected = jax.device_get(runs.step.first.params)
    # The decay is (1 + n) / (10 + n) for n = 1, 2, 3, limited by the configured decay.
    for state, decay in zip(runs.states[:3], [2 / 11, 0.22, 0.22], strict=True):
        state = jax.device_get(state)
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, expected, state.params)
        assert_close(state.ema, expected, 1e-5)
    # Negative control: the average differs from the parameters.
    assert np.abs(state.ema['embedding'] - state.params['embedding']).max() > 1e-4


def test_evaluation_uses_the_moving_average(runs):
    averaged, plain = runs.step.first, runs.plain.first
    assert evaluated_params(averaged) is averaged.ema
    assert plain.ema is None
    assert evaluated_params(plain) is plain.params


def test_a_batch_without_a_finite_loss_changes_nothing(runs):
    step, before = runs.step, runs.states[3]
    # A NaN weight of one token makes loss and gradient NaN.
    weights = step.rows['weights'].copy()
    weights[0, 0] = np.nan
    state, metrics = step.run(before, step.with_weights(weights))
    assert metrics['skipped']
    assert not metrics['spike']
    assert (int(state.step), int(state.skipped)) == (int(before.step) + 1, 1)
    for name in ('params', 'opt_state', 'ema'):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    # The next step is bit-identical to that of a run without the bad batch.
    then, metrics = step.run(state, step.batch)
    expected, expected_metrics = runs.states[4], runs.history[4]
    jax.tree.map(np.testing.assert_array_equal, (then.params, then.ema), (expected.params, expected.ema))
    assert metrics['learning_rate'] == expected_metrics['learning_rate']
    assert not np.array_equal(then.params['embedding'], state.params['embedding'])
    assert not np.array_equal(then.ema['embedding'], state.ema['embedding'])


def test_training_learns(runs):
    assert runs.history[-1]['loss'] < 0.8 * runs.history[0]['loss']


def test_training_with_muon_learns():
    _, history = Step(optimizer__name='muon').states(40)
    assert history[-1]['loss'] < 0.8 * history[0]['loss']


def test_z_loss_is_differentiated_but_not_counted_as_loss(runs):
    without = runs.plain_metrics
    _, (metrics,) = Step(train__z_loss=0.1, train__per_device_batch_size=2, optimizer__max_grad_norm=0.0).states(1)
    np.testing.assert_allclose(metrics['loss'], without['loss'], rtol=1e-6)
    assert abs(metrics['grad_norm'] - without['grad_norm']) > 0.01
    # Initially all logits are near 0, so Z is about the vocabulary size.
    assert metrics['z_loss'] == pytest.approx(0.1 * np.log(61) ** 2, rel=0.02)


def eval_program(**settings):
    config = small_config(**MODEL, **settings)
    layout = small_layout(config)
    params = abstract_state(config, layout).params
    return str(jax.make_jaxpr(make_eval_step(config, layout))(params, None, small_batch(config)))


def test_evaluation_has_neither_z_loss_nor_dropout():
    plain = eval_program()
    assert eval_program(train__z_loss=0.1, model__dropout=0.3) == plain
    # Negative control: micro-batches change the program.
    assert eval_program(train__per_device_batch_size=2) != plain


def test_dropout_differs_by_step_only():
    step = Step(model__dropout=0.3)

    def loss(number):
        counter = jax.device_put(np.int32(number), step.first.step.sharding)
        return float(step.run(step.first._replace(step=counter), step.batch)[1]['loss'])

    assert len({loss(0), loss(1), loss(2)}) == 3
    assert loss(1) == loss(1)


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_the_initial_state_matches_the_abstract_state(name):
    settings = {
        'optimizer__moment_dtype': 'int8',
        'optimizer__ema_decay': 0.9,
        'guard__spike_window': 16,
        'model__dim': 64,
    }
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__name=name, **settings)
    layout = small_layout(config)
    abstract, state = abstract_state(config, layout), jax.eval_shape(lambda: init_state(config, layout))
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} >= {jnp.dtype('int8'), jnp.dtype('float32')}


def test_each_parameter_has_the_moments_of_its_own_optimizer():
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__name='muon')
    state = abstract_state(config, small_layout(config))
    named = jax.tree_util.tree_leaves_with_path
    momentum, mu, nu = (optax.tree.get(state.opt_state, name) for name in ('momentum', 'mu', 'nu'))
    kernels = {path for path, _ in named(state.params['blocks']) if path[-1].key == 'kernel'}
    assert {path for path, _ in named(momentum)} == {(jax.tree_util.DictKey('blocks'), *path) for path in kernels}
    assert {path for path, _ in named(mu)} == {path for path, _ in named(nu)}
    params = dict(named(state.params))
    assert {path for path, _ in named(momentum)} | {path for path, _ in named(mu)} == params.keys()
    assert len(named(momentum)) + len(named(mu)) == len(params)
    for path, moment in (*named(momentum), *named(mu), *named(nu)):
        assert moment.sharding == params[path].sharding, path


def test_parameters_moments_and_their_average_are_sharded():
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__ema_decay=0.9)
    state = abstract_state(config, small_layout(config))
    mu = optax.tree.get(state.opt_state, 'mu')
    for tree in (state.params, mu, state.ema):
        kernel = tree['blocks']['attention']['query']['kernel']
        assert np.prod(kernel.sharding.shard_shape(kernel.shape)) * 8 == kernel.size
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state.params, mu, state.ema)]
    assert shardings[0] == shardings[1] == shardings[2]


def test_an_indivisible_parameter_is_named():
    config = small_config(num_devices=8, mesh__tensor=2, model__dim=34, model__head_dim=8)
    with pytest.raises(InputError, match=r"context=4 .*'embed' axis of blocks.*, which has size 34.* 32, 36"):
        abstract_state(config, small_layout(config))
