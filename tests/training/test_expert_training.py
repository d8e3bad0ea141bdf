"""Training steps of models with experts: objectives, adapters, moving averages and the bias that balances the loads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.experts.router import RouterStats
from maxlm.training.losses.router import router_terms
from maxlm.training.state import init_state
from maxlm.training.step import make_eval_step, make_train_step
from tests.small import EXPERTS, small_batch, small_config, small_layout

FAST = {**EXPERTS, 'optimizer__warmup_steps': 0}
BALANCED = {**FAST, 'model__router_balance_bias': True, 'train__router_bias_rate': 0.5}


def step(config, batch=None):
    """Returns the states before and after a step, and its metrics."""
    layout = small_layout(config)
    before = init_state(config, layout)
    batch = layout.put_batch(batch or small_batch(config), config.train.global_batch_size)
    after, metrics = jax.jit(make_train_step(config, layout))(before, batch)
    return before, after, jax.device_get(metrics)


def changed(before, after):
    """Returns the dotted names of the parameters that the step changed."""
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {'.'.join(key.key for key in path) for (path, old), new in pairs if not np.array_equal(old, new)}


def test_the_bias_moves_toward_a_balanced_load():
    config = small_config(**BALANCED, optimizer__ema_decay=0.9)
    _, after, metrics = step(config)
    load_LE = metrics['expert_load']
    # Two of three layers have experts, and padding is not routed.
    assert load_LE.shape == (2, 4)
    num_tokens = (small_batch(config)['segments'] > 0).sum()
    np.testing.assert_array_equal(load_LE.sum(axis=1), [2 * num_tokens] * 2)
    expected = 0.5 * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    for params in (after.params, after.ema):
        np.testing.assert_array_equal(params['blocks']['feedforward']['router']['balance_bias'], expected)
    assert np.abs(expected).max() > 0
    # A skipped step does not change it.
    batch = small_batch(config)
    broken = dataclasses.replace(config, guard=dataclasses.replace(config.guard, spike_window=16))
    skipped_before, skipped, skipped_metrics = step(broken, {**batch, 'weights': batch['weights'] * np.nan})
    assert skipped_metrics['skipped']
    assert changed(skipped_before.params, skipped.params) == set()


def test_every_parameter_learns():
    before, after, _ = step(small_config(**FAST))
    names = {'.'.join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(before.params)}
    assert changed(before.params, after.params) == names
    assert {'blocks.feedforward.router.kernel', 'dense_blocks.feedforward.up.kernel'} < names


def test_adapters_of_experts_learn_and_the_router_does_not():
    config = small_config(**BALANCED, model__lora_rank=2)
    before, after, _ = step(config)
    names = changed(before.params, after.params)
    assert 'blocks.feedforward.experts.down.lora_b' in names
    assert all(name.endswith(('lora_a', 'lora_b')) for name in names)


@pytest.mark.parametrize('objective', ['dpo', 'grpo'])
def test_post_training(objective):
    config = small_config(**BALANCED)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, objective=objective))
    batch = small_batch(config)
    rng = np.random.default_rng(0)
    batch |= {
        'predicted': batch['weights'],
        'advantages': np.broadcast_to(rng.normal(size=(8, 1)), batch['weights'].shape).astype(np.float32),
        'old_log_probs': rng.normal(-4, 0.3, batch['weights'].shape).astype(np.float32),
    }
    before, after, metrics = step(config, batch)
    assert np.isfinite(metrics['loss'])
    names = changed(before.params, after.params)
    assert 'blocks.feedforward.experts.up.kernel' in names
    # Only next-token training changes the bias.
    assert 'blocks.feedforward.router.balance_bias' not in names
    assert 'expert_load' not in metrics


def test_evaluation_has_no_losses_of_the_router():
    config = small_config(**FAST, train__load_balancing_loss=10.0)
    layout = small_layout(config)
    state, batch = init_state(config, layout), layout.put_batch(small_batch(config), 8)
    sums = jax.jit(make_eval_step(config, layout))(state.params, None, batch)
    _, _, metrics = step(config)
    np.testing.assert_allclose(sums.loss / sums.weight, metrics['loss'], rtol=1e-5)
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, load_balancing_loss=0.0))
    # The loss of the router is in the gradient only.
    assert step(plain)[2]['grad_norm'] < 0.9 * metrics['grad_norm']
    np.testing.assert_allclose(step(plain)[2]['loss'], metrics['loss'], rtol=1e-5)


def test_losses_are_means_over_the_tokens_of_a_step():
    # Two micro-batches with 1 and 3 tokens, and two layers.
    values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    stats = RouterStats(jnp.zeros((2, 2, 4)), values, 10 * values, values, values)
    weights_BT = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    train = dataclasses.replace(small_config(**FAST).train, load_balancing_loss=0.1, router_z_loss=0.01)
    loss, parts = router_terms(stats, weights_BT, train)
    total = 1 * (1 + 2) + 3 * (3 + 4)
    assert float(loss) == pytest.approx(0.1 * total + 0.01 * 10 * total)
    assert {name: float(value) for name, value in parts.items()} == pytest.approx(
        {
            'load_balancing_loss': total / 2,
            'router_z_loss': 5 * total,
            'router_entropy': total / 2,
            'dropped_tokens': total / 2,
        }
    )
