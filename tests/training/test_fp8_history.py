"""Delayed scaling: the history of largest elements is the same on all layouts, and changes once per good step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.training import fp8_history
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state, optimizer_of
from tests.parameters import first_state
from tests.small import small_batch, small_config, small_layout

COMMON = {
    'model__vocab_size': 64,
    'model__matmul_precision': 'fp8',
    'train__global_batch_size': 16,
    'train__per_device_batch_size': 4,
}
DELAYED = {'model__fp8_scaling': 'delayed', 'model__fp8_history': 3}
STEPS = 3
LAYOUTS = [
    # Another number of micro-batches, and all layers unrolled.
    {'train__per_device_batch_size': 8, 'model__scan_layers': False},
    {'model__remat_policy': 'full'},
    {
        'num_devices': 8,
        'mesh__fsdp': 2,
        'mesh__tensor': 2,
        'mesh__context': 2,
        'mesh__zero_stage': 3,
        'train__per_device_batch_size': 2,
        'model__remat_policy': 'dots',
    },
    # Each device accumulates the gradients and largest elements of its own rows.
    {'num_devices': 4, 'mesh__fsdp': 4, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 2},
]


@functools.cache
def compiled(**overrides):
    """Returns a resolved config, its layout and its step."""
    config = small_config(**{**COMMON, **overrides})
    layout = small_layout(config)
    return config, layout, compile_train_step(config, layout, abstract_state(config, layout)).step


def start(config, layout):
    state, shapes = first_state(config, layout, std=0.02), abstract_state(config, layout)
    return jax.tree.map(lambda array, shape: jax.device_put(array, shape.sharding), state, shapes)


def run(steps=STEPS, **overrides):
    """Returns the states and the metrics before and after each step."""
    config, layout, step = compiled(**overrides)
    states, rows = [start(config, layout)], []
    for seed in range(steps):
        batch = layout.put_batch(small_batch(config, seed), config.train.global_batch_size)
        # A copy, because the step may reuse the memory of its argument.
        state, metrics = step(jax.tree.map(jnp.copy, states[-1]), batch)
        states.append(state)
        rows.append([float(metrics[name]) for name in ('loss', 'grad_norm')])
    return states, np.array(rows)


@functools.cache
def expected():
    return run(**DELAYED)


def largest(params, num_layers):
    """Returns the largest elements of the projections' kernels [layers, projections], in the order of their paths."""
    found = []
    for part in ('attention', 'feedforward'):
        for _, module in sorted(params['blocks'][part].items()):
            kernel = np.asarray(module['kernel'])
            found.append(np.abs(kernel).reshape(num_layers, -1).max(axis=1))
    return np.stack(found, axis=1)


def test_a_step_records_the_largest_elements():
    states, _ = expected()
    shape = (3, 6, 2, 3)  # steps, projections, layers, arrays
    histories = [np.asarray(state.fp8_history).reshape(shape) for state in states]
    assert not histories[0].any()
    for before, after, state in zip(histories, histories[1:], states, strict=False):
        np.testing.assert_array_equal(after[:-1], before[1:])
        assert (after[-1] > 0).all()
        np.testing.assert_array_equal(after[-1, :, :, 1].T, largest(state.params, 2))
    newest = histories[-1][-1]
    key, out, query, value = range(4)
    # These have the same input. The gradients of their outputs differ.
    assert (newest[key, :, 0] == newest[query, :, 0]).all()
    assert (newest[key, :, 0] == newest[value, :, 0]).all()
    assert (newest[key, :, 0] != newest[out, :, 0]).all()
    assert (newest[key, :, 2] != newest[query, :, 2]).all()


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_every_layout_has_the_same_history(layout):
    states, rows = run(**DELAYED, **layout)
    expected_states, expected_rows = expected()
    np.testing.assert_allclose(rows, expected_rows, rtol=3e-4)
    found, right = (np.asarray(each[-1].fp8_history) for each in (states, expected_states))
    np.testing.assert_allclose(found, right, rtol=2e-2)
    shards = states[-1].fp8_history.addressable_shards
    assert all(np.array_equal(shard.data, shards[0].data) for shard in shards)


def test_losses_are_close_to_those_of_current_scaling():
    _, rows = expected()
    _, current = run()
    # Without a history, the scales of the first step are 1.
    np.testing.assert_allclose(rows[:, 0], current[:, 0], rtol=1e-2)
    # Control: other scales give other results.
    assert (rows[:, 1] != current[:, 1]).any()


def test_a_bad_step_changes_no_history():
    config, layout, step = compiled(**DELAYED)
    before = expected()[0][-1]
    for weight, ok in ((np.nan, False), (1.0, True)):
        rows = small_batch(config, 7)
        rows |= {'weights': (weight * rows['weights']).astype(np.float32)}
        batch = layout.put_batch(rows, config.train.global_batch_size)
        after, metrics = step(jax.tree.map(jnp.copy, before), batch)
        assert bool(metrics['skipped']) != ok
        assert np.array_equal(after.fp8_history, before.fp8_history) != ok


def test_an_infinite_largest_element_is_a_bad_step():
    """Its value in FP8 is finite, so the loss may be, too."""
    config, layout, step = compiled(**DELAYED)
    before = expected()[0][-1]
    up = before.params['blocks']['feedforward']['up']
    bias = jax.device_put(np.asarray(up['bias']).copy() * 0 + np.inf, up['bias'].sharding)
    params = jax.tree.map(jnp.copy, before.params)
    params['blocks']['feedforward']['up']['bias'] = bias
    batch = layout.put_batch(small_batch(config, 7), config.train.global_batch_size)
    after, metrics = step(jax.tree.map(jnp.copy, before)._replace(params=params), batch)
    assert bool(metrics['skipped'])
    np.testing.assert_array_equal(after.fp8_history, before.fp8_history)


def test_parameters_and_optimizer_contain_no_scales():
    config, layout, _ = compiled(**DELAYED)
    other = small_config(**COMMON)
    state, plain = abstract_state(config, layout), abstract_state(other, small_layout(other))
    assert jax.tree.structure(state.params) == jax.tree.structure(plain.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(plain.opt_state)
    assert jax.eval_shape(optimizer_of(config, layout).init, state.params)
    assert plain.fp8_history is None


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    config, layout, step = compiled(**DELAYED)
    state = expected()[0][2]
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(int(state.step), state, {})
        restored = checkpoints.restore(int(state.step), abstract_state(config, layout)).state
    batch = layout.put_batch(small_batch(config, 2), config.train.global_batch_size)
    continued, _ = step(restored, batch)
    uninterrupted = expected()[0][3]
    pairs = zip(jax.tree.leaves(continued), jax.tree.leaves(uninterrupted), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    # Negative control: without the history, the step differs.
    without = state._replace(fp8_history=jnp.zeros_like(state.fp8_history))
    other, _ = step(jax.tree.map(jnp.copy, without), batch)
    assert not np.array_equal(other.params['embedding'], continued.params['embedding'])


@pytest.mark.parametrize(
    ('stored', 'expected'),
    [
        (None, [[0, 0], [0, 0]]),
        ([[1, 2]], [[0, 0], [1, 2]]),
        ([[1, 2], [3, 4], [5, 6]], [[3, 4], [5, 6]]),
        ([[1, 2, 3]], [[0, 0], [0, 0]]),
    ],
)
def test_a_checkpoint_with_another_history(stored, expected):
    np.testing.assert_array_equal(fp8_history.fp8_history_from_json(stored, (2, 2)), expected)
