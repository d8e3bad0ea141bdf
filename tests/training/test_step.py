"""The training step: accumulation, clipping, skipping, dropout, and the same numbers on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.training import sharding
from maxlm.training.step import abstract_state, init_state, make_eval_step, make_loss_sum, make_train_step
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
    loss_sum = jax.jit(make_loss_sum(small_config(), layout))
    params = init_state(small_config(), layout).params
    sums, tokens = zip(
        *(loss_sum(params, {k: jnp.asarray(v[i::2]) for k, v in batch.items()}, None) for i in range(2)), strict=True
    )
    means = np.mean([float(s) / float(t) for s, t in zip(sums, tokens, strict=True)])
    assert abs(means - metrics['loss']) > 1e-5


LAYOUTS = [
    {'mesh__data': 8, 'mesh__fsdp': 1},
    {'mesh__fsdp': 8},
    {'mesh__tensor': 4, 'mesh__fsdp': 2},
    {'mesh__replica': 2, 'mesh__data': 2, 'mesh__tensor': 2, 'mesh__fsdp': 1},
    {'mesh__replica': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'train__micro_batch': 1, 'model__remat': 'full'},
    {'mesh__fsdp': 4, 'mesh__data': 2, 'model__family': 'llama', 'model__num_kv_heads': 2},
]


@pytest.mark.parametrize('layout', LAYOUTS, ids=lambda layout: ','.join(f'{k[6:]}={v}' for k, v in layout.items()))
def test_every_layout_computes_what_one_device_computes(layout):
    # A vocabulary that the tensor axis divides.
    model = {'model__vocab_size': 64} | {k: v for k, v in layout.items() if k.startswith('model')}
    one = small_config(**model)
    many = small_config(num_devices=8, **{**model, **layout})
    batch = small_batch(one)
    states, history = run(one, [batch], steps=3)
    other_states, other_history = run(many, [batch], steps=3)
    # The first moment after the first step is a tenth of the clipped gradient.
    moments, other_moments = (optax.tree.get(each[0].opt_state, 'mu') for each in (states, other_states))
    assert_close(other_moments, moments, 2e-6)
    for metrics, other in zip(history, other_history, strict=True):
        np.testing.assert_allclose(other['loss'], metrics['loss'], rtol=1e-5)


def test_parameters_and_moments_are_sharded():
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64)
    state = init_state(config, small_layout(config))
    kernel = state.params['blocks']['attention']['query']['kernel']
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    moment = optax.tree.get(state.opt_state, 'mu')['blocks']['attention']['query']['kernel']
    assert moment.sharding == kernel.sharding


def test_a_parameter_that_does_not_divide_is_named():
    config = small_config(num_devices=8, mesh__tensor=2)
    with pytest.raises(sharding.InputError, match=r"mesh\.tensor=2 .*'vocab' axis of embedding, which has 61.* 60, 62"):
        abstract_state(config, small_layout(config))


def test_a_table_that_splits_two_axes_over_one_mesh_axis_is_refused(monkeypatch):
    config = small_config(num_devices=8)
    monkeypatch.setitem(sharding.TABLE, 'ffn', ('fsdp',))
    with pytest.raises(AssertionError, match='two axes over one mesh axis'):
        abstract_state(config, small_layout(config))


def test_a_batch_without_a_finite_loss_changes_nothing(monkeypatch):
    config = small_config()
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    good = layout.put_batch(small_batch(config), 8)
    state, _ = step(init_state(config, layout), good)
    # The weight of one token is not a number: so are loss and gradient.
    bad = {**good, 'weights': good['weights'].at[0, 0].set(jnp.nan)}
    after, metrics = step(state, bad)
    assert metrics['skipped']
    assert (int(after.step), int(after.skipped)) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))
    # The next step is, bit for bit, the one of a run that never saw the bad batch.
    then, metrics = step(after, good)
    wanted, wanted_metrics = step(state, good)
    jax.tree.map(np.testing.assert_array_equal, then.params, wanted.params)
    assert metrics['learning_rate'] == wanted_metrics['learning_rate']
    assert not np.array_equal(then.params['embedding'], after.params['embedding'])


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
    assert float(evaluate(params, batch)[0]) == float(evaluate(params, batch)[0])


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


def test_training_learns():
    config = small_config(train__num_steps=40)
    _, history = run(config, [small_batch(config)], steps=40)
    assert history[-1]['loss'] < 0.5 * history[0]['loss']
