"""Learning-rate schedules and AdamW against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.keys import OptimizerConfig
from maxlm.training.optimizer import decay_mask, make_optimizer, make_schedule


def test_warmup_then_cosine():
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
    schedule = make_schedule(config, 110)
    for step, wanted in [(0, 0), (5, 0.5), (10, 1), (60, 0.55), (110, 0.1), (500, 0.1)]:
        assert float(schedule(step)) == pytest.approx(wanted, abs=1e-6), step
    assert float(schedule(35)) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-6)


def test_constant_and_no_warmup():
    constant = make_schedule(OptimizerConfig(learning_rate=1.0, schedule='constant', warmup_steps=2), 10)
    assert [float(constant(step)) for step in (0, 1, 2, 9)] == [0, 0.5, 1, 1]
    assert float(make_schedule(OptimizerConfig(learning_rate=1.0), 10)(0)) == 1


def test_a_run_shorter_than_its_warmup_stays_in_it():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=2000), 2)
    assert float(schedule(1)) == pytest.approx(1 / 2000, rel=1e-4)


def test_decay_falls_on_matrices_and_embeddings_only():
    params = {'embedding': 0, 'blocks': {'query': {'kernel': 0, 'bias': 0}, 'norm': {'scale': 0}}}
    assert decay_mask(params) == {
        'embedding': True,
        'blocks': {'query': {'kernel': True, 'bias': False}, 'norm': {'scale': False}},
    }


def test_adamw_is_the_formula():
    config = OptimizerConfig(learning_rate=0.1, schedule='constant', weight_decay=0.5, epsilon=1e-8)
    optimizer = make_optimizer(config, make_schedule(config, 10))
    params = {'kernel': jnp.array([1.0, -2.0]), 'bias': jnp.array([3.0])}
    state = optimizer.init(params)
    moments = {name: [np.zeros_like(value), np.zeros_like(value)] for name, value in params.items()}
    wanted = {name: np.array(value) for name, value in params.items()}
    for step in range(1, 4):
        grads = {'kernel': jnp.array([0.3, -1.0]) * step, 'bias': jnp.array([0.7])}
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for name, grad in grads.items():
            m, v = moments[name]
            m[:] = 0.9 * m + 0.1 * np.array(grad)
            v[:] = 0.95 * v + 0.05 * np.array(grad) ** 2
            adam = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            decay = 0.5 * wanted[name] if name == 'kernel' else 0
            wanted[name] = wanted[name] - 0.1 * (adam + decay)
            np.testing.assert_allclose(params[name], wanted[name], rtol=1e-5)
