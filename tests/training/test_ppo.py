"""PPO with a value head: its step on all layouts, its parameters, and other losses of responses on these layouts."""

import functools

import jax
import numpy as np
import pytest

from maxlm.training.batch import OLD_VALUES, RETURNS, batch_shapes
from maxlm.training.gradients import make_gradients
from maxlm.training.optimizers.trainable import is_trained
from maxlm.training.state import abstract_params, init_state
from tests.small import small_batch, small_config, small_layout, small_state

PPO = {
    # A bias of the keys would have no gradient, only rounding errors.
    'model__family': 'llama',
    'train__init_from': 'base',
    'train__objective': 'grpo',
    'grpo__max_completion_length': 8,
    'grpo__advantage_estimator': 'gae',
    'grpo__kl_coef': 0.1,
    'grpo__kl_estimator': 'k2',
    'grpo__entropy_coef': 0.05,
    'grpo__vf_coef': 0.3,
}
CISPO = {**PPO, 'grpo__advantage_estimator': 'rloo', 'grpo__loss_type': 'cispo', 'grpo__epsilon_high': 1.05}
del CISPO['grpo__vf_coef']
LAYOUTS = {
    'accumulation': {'train__per_device_batch_size': 2},
    'data and tensor': {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2},
    'ZeRO-1': {'mesh__fsdp': 8, 'mesh__zero_stage': 1},
    'ZeRO-2, accumulation': {'mesh__fsdp': 4, 'mesh__zero_stage': 2, 'train__per_device_batch_size': 1},
}


def batch_of(config):
    rng = np.random.default_rng(0)
    batch = small_batch(config)
    shape, predicted = batch['tokens'].shape, batch['weights']
    arrays = {'predicted': predicted, 'old_log_probs': rng.normal(-4, 0.3, shape), 'advantages': rng.normal(size=shape)}
    if config.model.value_head:
        arrays |= {OLD_VALUES: rng.normal(0, 0.3, shape), RETURNS: rng.normal(size=shape)}
    batch |= {name: array.astype(np.float32) for name, array in arrays.items()}
    # The weights differ between rows, like those of loss_type=grpo.
    return batch | {'weights': predicted * rng.uniform(0.5, 1, (shape[0], 1)).astype(np.float32)}


def results(settings, layout=None):
    """Returns the sums and the gradients of a batch by parameters of a fixed seed and another reference."""
    layout = layout or {}
    devices = np.prod([size for key, size in layout.items() if key in ('mesh__data', 'mesh__fsdp', 'mesh__tensor')])
    config = small_config(num_devices=int(devices), model__vocab_size=64, **settings, **layout)
    placed = small_layout(config)
    state = small_state(config, placed)
    state = state._replace(reference=small_state(config, placed, seed=1).params)
    batch = placed.put_batch(batch_of(config), config.train.global_batch_size)
    sums, gradients, _ = jax.jit(make_gradients(config, placed))(state, batch, jax.random.key(0), None)
    return jax.device_get((sums, gradients))


@functools.cache
def on_one_device(is_ppo):
    return results(PPO if is_ppo else CISPO)


@pytest.mark.parametrize('is_ppo', [True, False], ids=['PPO', 'CISPO'])
@pytest.mark.parametrize('name', LAYOUTS)
def test_every_layout_equals_one_device(name, is_ppo):
    expected, expected_gradients = on_one_device(is_ppo)
    sums, gradients = results(PPO if is_ppo else CISPO, LAYOUTS[name])
    for found, other in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4)
    for (path, gradient), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-4 * np.abs(other).max(), err_msg=str(path))
    assert ('value_head' in gradients) == is_ppo


def test_the_loss_contains_the_value_loss():
    sums, gradients = on_one_device(True)
    free, without = results({**PPO, 'grpo__vf_coef': 0.0})
    assert sums.parts['value_loss'] > 0
    assert 0 < sums.parts['value_clip_fraction'] < sums.tokens
    assert np.abs(gradients['value_head']['kernel']).max() > 1e-3
    # Negative control: without its weight, the value head has no gradient, and the loss is lower.
    assert not without['value_head']['kernel'].any()
    assert free.loss < sums.loss


def test_the_step_of_ppo_reads_its_arrays():
    config = small_config(**PPO)
    shapes = batch_shapes(config, small_layout(config))
    assert {OLD_VALUES, RETURNS} <= shapes.keys()
    other = small_config(**CISPO)
    assert not {OLD_VALUES, RETURNS} & batch_shapes(other, small_layout(other)).keys()
    assert not other.model.value_head


def test_values_are_0_before_the_first_step():
    config = small_config(**PPO)
    kernel = init_state(config, small_layout(config)).params['value_head']['kernel']
    assert kernel.shape == (config.model.dim, 1)
    assert not np.any(kernel)


def test_adapters_are_trained_with_the_value_head():
    config = small_config(**PPO, model__lora_rank=2)
    assert is_trained(config, 'value_head.kernel')
    assert not is_trained(config, 'embedding')
    assert 'value_head' in abstract_params(config, small_layout(config))
