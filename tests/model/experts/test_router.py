"""Selection of experts against the implementations of Transformers, and the statistics of the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2
from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

from maxlm.config.schema import ModelConfig
from maxlm.model.experts.router import RouterStats, router_stats, select_experts

N, D, E, K = 16, 8, 8, 3


def model(**settings):
    return ModelConfig(num_experts=E, num_experts_per_token=K, **settings)


def by_expert(experts, weights):
    """Returns the weight of each expert and token, [N, E]."""
    dense = np.zeros((len(experts), E))
    np.put_along_axis(dense, np.asarray(experts), np.asarray(weights), axis=1)
    return dense


def test_softmax_router_equals_mixtral():
    logits = np.random.default_rng(0).normal(size=(N, E)).astype(np.float32)
    # Mixtral, Qwen3-MoE and gpt-oss: the softmax over the selected logits.
    top, experts = torch.topk(torch.from_numpy(logits), K)
    expected = by_expert(experts, torch.softmax(top, dim=-1))
    np.testing.assert_allclose(by_expert(*select_experts(logits, None, model())), expected, atol=1e-6)
    unnormalized = by_expert(*select_experts(logits, None, model(router_normalize=False)))
    assert np.abs(unnormalized - expected).max() > 0.01
    np.testing.assert_allclose(unnormalized.sum(axis=1), np.where(unnormalized > 0, jax.nn.softmax(logits), 0).sum(1))


def test_sigmoid_router_equals_deepseek_v3():
    settings = {'n_group': 4, 'topk_group': 2, 'num_experts_per_tok': K, 'routed_scaling_factor': 2.5}
    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=D, num_attention_heads=2, n_routed_experts=E, norm_topk_prob=True, **settings
    )
    gate = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    rng = np.random.default_rng(1)
    kernel, bias, x = rng.normal(size=(E, D)), rng.normal(0, 0.3, E), rng.normal(size=(N, D))
    with torch.no_grad():
        gate.weight.copy_(torch.from_numpy(kernel))
        gate.e_score_correction_bias.copy_(torch.from_numpy(bias))
        logits, weights, experts = gate(torch.from_numpy(x).float()[None])
    logits, expected = jnp.asarray(logits.numpy()), by_expert(experts, weights)
    ours = {'router_score': 'sigmoid', 'num_expert_groups': 4, 'num_groups_per_token': 2, 'expert_group_score': 'top2'}
    ours |= {'routed_scaling_factor': 2.5, 'router_balance_bias': True}
    found = select_experts(logits, jnp.asarray(bias, jnp.float32), model(**ours))
    np.testing.assert_allclose(by_expert(*found), expected, atol=1e-6)
    # Negative controls: without the bias, and with all groups, other experts are selected.
    for changed in ({'num_groups_per_token': 4}, {'expert_group_score': 'max'}):
        other = select_experts(logits, jnp.asarray(bias, jnp.float32), model(**ours | changed))
        assert np.abs(by_expert(*other) - expected).max() > 0.01
    assert np.abs(by_expert(*select_experts(logits, None, model(**ours))) - expected).max() > 0.01


def test_group_limited_softmax_router_equals_deepseek_v2():
    config = configuration_deepseek_v2.DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=2,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        topk_method='group_limited_greedy',
        routed_scaling_factor=3.0,
    )
    gate = modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    rng = np.random.default_rng(2)
    with torch.no_grad():
        gate.weight.copy_(torch.from_numpy(rng.normal(size=(E, D))))
        logits, weights, experts = gate(torch.from_numpy(rng.normal(size=(N, D))).float()[None])
    logits, expected = jnp.asarray(logits.numpy()), by_expert(experts, weights)
    ours = model(router_normalize=False, num_expert_groups=4, num_groups_per_token=2, routed_scaling_factor=3.0)
    np.testing.assert_allclose(by_expert(*select_experts(logits, None, ours)), expected, atol=1e-6)


def stats(logits_BTE, is_token_BT=None, **settings):
    config = model(**settings)
    experts, _ = select_experts(logits_BTE.reshape(-1, E), None, config)
    valid = np.ones(len(experts), bool) if is_token_BT is None else is_token_BT.reshape(-1)
    load = np.bincount(np.asarray(experts)[valid].reshape(-1), minlength=E)
    return router_stats(logits_BTE, jnp.asarray(load), jnp.zeros((), int), is_token_BT, config)


def test_losses_of_balanced_and_collapsed_routers():
    balanced = np.eye(E)[np.arange(2 * E).reshape(2, E) % E] * 1e-4
    found = stats(jnp.asarray(balanced, jnp.float32), num_groups_per_token=1)
    assert float(found.load_balancing_loss) == pytest.approx(1, abs=0.6)
    collapsed = jnp.zeros((2, E, E)).at[..., :K].set(20.0)
    found = stats(collapsed)
    # All K shares are 1/K and all K probabilities are 1/K, so E · K · 1/K² remains.
    assert float(found.load_balancing_loss) == pytest.approx(E / K, rel=1e-3)
    assert float(found.entropy) == pytest.approx(np.log(K), rel=1e-3)
    assert float(found.z_loss) == pytest.approx((20 + np.log(K)) ** 2, rel=1e-3)
    assert found.load_E.tolist() == [2 * E] * K + [0] * (E - K)


def test_padding_does_not_count():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, E)), jnp.float32)
    is_token = np.arange(6) < np.array([[4], [2]])
    changed = jnp.where(is_token[..., None], logits, 7 * logits[:, ::-1])
    first, second = (stats(x, jnp.asarray(is_token)) for x in (logits, changed))
    jax.tree.map(np.testing.assert_allclose, first, second)
    assert float(stats(changed).z_loss) != pytest.approx(float(first.z_loss), rel=1e-3)


def test_gradients_of_the_losses_balance_the_router():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(1, 64, E)) + np.linspace(0, 2, E), jnp.float32)
    found = jax.grad(lambda x: stats(x).load_balancing_loss)(logits).sum(axis=(0, 1))
    load = np.asarray(stats(logits).load_E)
    # The logits of the most loaded expert decrease.
    assert found[load.argmax()] > 0 > found[load.argmin()]
    for field in ('load_E', 'entropy', 'dropped'):
        gradient = jax.grad(lambda x, f=field: getattr(stats(x), f).sum())(logits)
        assert not np.abs(gradient).any(), field
    assert set(RouterStats._fields) == {'load_E', 'load_balancing_loss', 'z_loss', 'entropy', 'dropped'}
