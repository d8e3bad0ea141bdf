"""Tests the metrics of an update against formulas in NumPy and the states of optax, for each kind of optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.training.optimizers.quantized_moments import Blocks
from maxlm.training.optimizers.trainable import trainable
from maxlm.training.optimizers.update_metrics import UPDATE_METRICS, update_metrics
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state


@functools.lru_cache
def run(num_steps, num_devices=1, *, batches=None, **settings):
    """Returns the config, the last two states and the metrics of each step."""
    settings = {'optimizer__schedule': 'constant', 'optimizer__warmup_steps': 0, **settings}
    config = small_config(num_devices, **settings)
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    batch = small_batch(config)
    state, before, history = small_state(config, layout), None, []
    for index in range(num_steps):
        rows = layout.put_batch(batches(index, batch) if batches else batch, config.train.global_batch_size)
        before = state
        state, metrics = step(state, rows)
        history.append(jax.device_get(metrics))
    return config, before, state, history


def adam_of(state):
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    (adam,) = (node for node in nodes if isinstance(node, optax.ScaleByAdamState))
    return adam


def expected_ratio(config, before, after):
    """Computes the ratio in float64. The squared gradients follow from the second moments before and after."""
    beta2, adam = config.optimizer.beta2, adam_of(after)
    ratios = []
    for old, new in zip(jax.tree.leaves(adam_of(before).nu), jax.tree.leaves(adam.nu), strict=True):
        old, new = np.float64(old), np.float64(new)
        square = (new - beta2 * old) / (1 - beta2)
        second = new / (1 - beta2 ** int(adam.count))
        ratios.append(np.mean(square / np.maximum(second, config.optimizer.eps**2)))
    return np.sqrt(max(ratios)), len(ratios)


def change_of(config, before, after):
    parts = (jax.tree.leaves(trainable(config, state.params)) for state in (before, after))
    return np.sqrt(sum(np.sum((np.float64(new) - np.float64(old)) ** 2) for old, new in zip(*parts, strict=True)))


@pytest.mark.parametrize(
    ('settings', 'num_matrices'),
    [
        ({}, 0),
        # Muon trains the kernels of the blocks: four of attention and two of the feed-forward layer.
        ({'optimizer__name': 'muon'}, 6),
        ({'optimizer__frozen_params': ('embedding', 'blocks.feedforward')}, 0),
        ({'model__lora_rank': 2, 'model__family': 'llama'}, 0),
    ],
    ids=['adamw', 'muon', 'frozen', 'lora'],
)
def test_values_agree_with_the_states(settings, num_matrices):
    config, before, after, history = run(3, **settings)
    ratio, counted = expected_ratio(config, before, after)
    assert counted == len(jax.tree.leaves(trainable(config, after.params))) - num_matrices
    np.testing.assert_allclose(history[-1]['second_moment_ratio'], ratio, rtol=1e-3)
    np.testing.assert_allclose(history[-1]['update_norm'], change_of(config, before, after), rtol=1e-3)
    # Each g² / v is 1 at the first update, except for elements without a gradient.
    assert 0.9 < history[0]['second_moment_ratio'] <= 1 + 1e-5
    # Negative control: the biased moment, or the moment before the update, gives another value.
    assert abs(ratio / np.sqrt(1 - config.optimizer.beta2**3) - ratio) > 0.1


@pytest.mark.parametrize('moments', ['bfloat16', 'int8'])
def test_quantized_moments(moments):
    """Stored moments are rounded, so their ratio is only close to that of float32 moments."""
    large = {'model__dim': 128, 'model__num_layers': 1}
    _, _, after, history = run(3, optimizer__moment_dtype=moments, **large)
    expected = run(3, **large)[3]
    kinds = {type(node) for node in jax.tree.leaves(adam_of(after).nu, is_leaf=lambda node: isinstance(node, Blocks))}
    assert (Blocks in kinds) == (moments == 'int8')
    for name in UPDATE_METRICS:
        np.testing.assert_allclose(history[-1][name], expected[-1][name], rtol=0.05)


def test_all_meshes_give_the_same_values():
    expected = run(2)[3][-1]
    found = run(2, 8, mesh__fsdp=4, mesh__tensor=2, model__num_heads=4)[3][-1]
    for name in UPDATE_METRICS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)


def test_a_skipped_step_has_no_update():
    def batches(index, batch):
        return batch if index < 2 else {**batch, 'weights': np.full_like(batch['weights'], np.nan)}

    history = run(3, batches=batches)[3]
    assert [bool(metrics['skipped']) for metrics in history] == [False, False, True]
    assert history[1]['update_norm'] > 0
    assert history[2]['update_norm'] == 0


@pytest.mark.parametrize('part', ['optimizer', 'all'])
def test_offloaded_state_has_no_update_metrics(part):
    history = run(1, mesh__host_offload=part)[3]
    assert not set(UPDATE_METRICS) & history[0].keys()
    assert set(UPDATE_METRICS) <= run(1)[3][0].keys()


def test_growing_and_shrinking_gradients():
    """The formula of Wortsman et al. for one array: √mean(g² / max(v, eps²)), between 0 and 1/√(1 - beta2)."""
    config = small_config(optimizer__beta2=0.95)
    transform = optax.scale_by_adam(config.optimizer.beta1, config.optimizer.beta2)
    params = {'kernel': jnp.zeros((3, 5))}

    @jax.jit
    def update(grads, state):
        updates, state = transform.update(grads, state, params)
        return state, update_metrics(grads, updates, state, jnp.bool_(True), config)

    def ratios(scales):
        state, found, expected, second = transform.init(params), [], [], np.zeros((3, 5))
        rng = np.random.default_rng(0)
        for count, scale in enumerate(scales, start=1):
            grads = {'kernel': jnp.float32(scale * rng.normal(size=(3, 5)))}
            state, metrics = update(grads, state)
            found.append(float(metrics['second_moment_ratio']))
            square = np.float64(grads['kernel']) ** 2
            second = 0.95 * second + 0.05 * square
            expected.append(np.sqrt(np.mean(square / (second / (1 - 0.95**count)))))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        return found

    steady, grown, shrunk = ([1.0] * 100 + [scale] for scale in (1.0, 100.0, 0.01))
    assert 0.7 < ratios(steady)[-1] < 1.3
    assert 4.4 < ratios(grown)[-1] <= 0.05**-0.5
    assert ratios(shrunk)[-1] < 0.1
