"""The training step: accumulation, clipping, skipping, dropout, z-loss, moving average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.training import sharding
from maxlm.training.objectives import make_next_token
from maxlm.training.state import abstract_state, evaluated_params, init_state
from maxlm.training.step import make_eval_step, make_train_step
from tests.small import small_batch, small_config, small_layout


def run(config, batches, *, steps=1):
    """The states and metrics after each of some steps, on the host."""
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    state = init_state(config, layout)
    states, history = [], []
    for index in range(steps):
        batch = batches[index % len(batches)]
        state, metrics = step(state, layout.put_batch(batch, config.train.global_batch))
        states.append(jax.device_get(state))
        history.append(jax.device_get(metrics))
    return states, history


def assert_close(tree, other, rtol):
    """Relative to the largest element of each array: single elements of a gradient can be arbitrarily small."""
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-3))


def test_accumulation_is_exact_with_uneven_token_counts():
    batch = small_batch(small_config())
    counts = batch['weights'].reshape(2, 4, 16).sum((1, 2))
    assert counts[0] != counts[1], 'rows must differ, or a mean of means would pass'
    (whole,), (metrics,) = run(small_config(), [batch])
    for micro_batch in (4, 2, 1):
        config = small_config(train__micro_batch=micro_batch)
        assert config.accumulation == 8 // micro_batch
        (state,), (other,) = run(config, [batch])
        np.testing.assert_allclose(other['loss'], metrics['loss'], rtol=1e-6)
        np.testing.assert_allclose(other['grad_norm'], metrics['grad_norm'], rtol=1e-6)
        assert_close(state.opt_state, whole.opt_state, 1e-6)
    # Control: the mean of the micro-batches' means is another number.
    layout = small_layout(small_config())
    loss_sums = jax.jit(make_next_token(small_config(), layout))
    params = init_state(small_config(), layout).params
    halves = [{name: jnp.asarray(rows[i::2]) for name, rows in batch.items()} for i in range(2)]
    halves = [loss_sums(params, None, None, half, None) for half in halves]
    assert abs(np.mean([half.loss / half.tokens for _, half in halves]) - metrics['loss']) > 1e-5


def test_parameters_and_moments_are_sharded():
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64)
    state = init_state(config, small_layout(config))
    kernel = state.params['blocks']['attention']['query']['kernel']
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    moment = optax.tree.get(state.opt_state, 'mu')['blocks']['attention']['query']['kernel']
    assert moment.sharding == kernel.sharding


def test_each_parameter_has_the_moments_of_its_own_optimizer():
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__name='muon')
    layout = small_layout(config)
    state = init_state(config, layout)
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
    kernel = momentum['blocks']['attention']['query']['kernel']
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(abstract_state(config, layout)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)


def test_a_parameter_that_does_not_divide_is_named():
    config = small_config(num_devices=8, mesh__tensor=2)
    with pytest.raises(sharding.InputError, match=r"mesh\.tensor=2 .*'vocab' axis of embedding, which has 61.* 60, 62"):
        abstract_state(config, small_layout(config))


def test_a_batch_without_a_finite_loss_changes_nothing():
    config = small_config(optimizer__ema_decay=0.9, optimizer__warmup_steps=0)
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    good = layout.put_batch(small_batch(config), 8)
    state, _ = step(init_state(config, layout), good)
    # The weight of one token is not a number: so are loss and gradient.
    bad = {**good, 'weights': good['weights'].at[0, 0].set(jnp.nan)}
    after, metrics = step(state, bad)
    assert metrics['skipped']
    assert (int(after.step), int(after.skipped)) == (2, 1)
    for name in ('params', 'opt_state', 'ema'):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    # The next step is, bit for bit, the one of a run that never saw the bad batch.
    then, metrics = step(after, good)
    wanted, wanted_metrics = step(state, good)
    jax.tree.map(np.testing.assert_array_equal, (then.params, then.ema), (wanted.params, wanted.ema))
    assert metrics['learning_rate'] == wanted_metrics['learning_rate']
    assert not np.array_equal(then.params['embedding'], after.params['embedding'])
    assert not np.array_equal(then.ema['embedding'], after.ema['embedding'])


def test_the_moving_average_begins_short_and_is_what_is_evaluated():
    config = small_config(optimizer__ema_decay=0.22, optimizer__warmup_steps=0)
    initial = jax.device_get(init_state(config, small_layout(config)))
    jax.tree.map(np.testing.assert_array_equal, initial.ema, initial.params)
    states, _ = run(config, [small_batch(config)], steps=3)
    wanted = initial.params
    # (1 + n) / (10 + n) for n = 1, 2, 3, until it is more than the config says.
    for state, decay in zip(states, [2 / 11, 0.22, 0.22], strict=True):
        wanted = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, wanted, state.params)
        assert_close(state.ema, wanted, 1e-5)
        assert np.abs(state.ema['embedding'] - state.params['embedding']).max() > 1e-3
        assert evaluated_params(state) is state.ema
    without = abstract_state(small_config(), small_layout(config))
    assert without.ema is None
    assert evaluated_params(without) is without.params


def test_the_moving_average_is_sharded_and_its_own_array():
    config = small_config(num_devices=8, optimizer__ema_decay=0.9)
    layout = small_layout(config)
    state = init_state(config, layout)
    shardings, averaged = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state.params, state.ema))
    assert averaged == shardings
    # A donated state must not hold one array twice.
    step = jax.jit(make_train_step(config, layout), donate_argnums=0)
    after, _ = step(state, layout.put_batch(small_batch(config), 8))
    assert state.ema['embedding'].is_deleted()
    assert after.ema['embedding'].sharding == after.params['embedding'].sharding


def test_z_loss_is_differentiated_but_not_counted_as_loss():
    plain, config = small_config(), small_config(train__z_loss=0.1, train__micro_batch=2)
    batch = small_batch(plain)
    _, (without,) = run(plain, [batch])
    _, (metrics,) = run(config, [batch])
    np.testing.assert_allclose(metrics['loss'], without['loss'], rtol=1e-6)
    assert abs(metrics['grad_norm'] - without['grad_norm']) > 0.01
    # At the start all logits are near 0, so that Z is near the size of the vocabulary.
    assert metrics['z_loss'] == pytest.approx(0.1 * np.log(61) ** 2, rel=0.02)
    assert 'z_loss' not in without
    # What is evaluated knows nothing of it, only of the micro-batches.
    layout = small_layout(plain)
    params = abstract_state(plain, layout).params
    each = (plain, small_config(train__z_loss=0.1), config)
    programs = [str(jax.make_jaxpr(make_eval_step(config, layout))(params, None, batch)) for config in each]
    assert programs[0] == programs[1] != programs[2]


def test_clipping_bounds_the_gradient_and_leaves_small_ones():
    batch = small_batch(small_config())
    (free,), (metrics,) = run(small_config(optimizer__clip_norm=0.0), [batch])
    norm = float(metrics['grad_norm'])
    (loose,), _ = run(small_config(optimizer__clip_norm=2 * norm), [batch])
    (tight,), (clipped,) = run(small_config(optimizer__clip_norm=norm / 4), [batch])
    assert clipped['grad_norm'] == metrics['grad_norm']
    moment = optax.tree.get(free.opt_state, 'mu')
    assert_close(optax.tree.get(loose.opt_state, 'mu'), moment, 1e-6)
    quarter = jax.tree.map(lambda m: m / 4, moment)
    assert_close(optax.tree.get(tight.opt_state, 'mu'), quarter, 1e-5)


def test_dropout_differs_by_step_and_seed_only():
    batch = small_batch(small_config())
    config = small_config(model__dropout=0.3, optimizer__learning_rate=1e-30)
    _, history = run(config, [batch], steps=2)
    _, again = run(config, [batch], steps=2)
    assert history[0]['loss'] != history[1]['loss']
    assert [m['loss'] for m in history] == [m['loss'] for m in again]
    layout = small_layout(config)
    params = init_state(config, layout).params
    evaluate = jax.jit(make_eval_step(config, layout))
    assert float(evaluate(params, None, batch).loss) == float(evaluate(params, None, batch).loss)


def test_metrics_are_those_of_the_batch():
    config = small_config()
    batch = small_batch(config)
    (state,), (metrics,) = run(config, [batch])
    assert metrics['tokens'] == batch['weights'].sum()
    assert abs(metrics['loss'] - np.log(61)) < 0.2
    assert metrics['learning_rate'] == 0
    np.testing.assert_allclose(metrics['param_norm'], optax.tree.norm(state.params), rtol=1e-5)
    # Update 0 of the warm-up has rate 0: the parameters are still the initial ones.
    layout = small_layout(config)
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.device_get(init_state(config, layout).params))


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_training_learns(name):
    config = small_config(train__num_steps=40, optimizer__name=name)
    _, history = run(config, [small_batch(config)], steps=40)
    assert history[-1]['loss'] < 0.5 * history[0]['loss']
