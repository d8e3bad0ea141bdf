"""Advantages of responses and tokens against published formulas and other libraries."""

import dataclasses

import numpy as np
import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.training.losses.advantages import EPSILON, advantages, generalized_advantages, whitened

CONFIG = GrpoConfig(num_generations=4)
REWARDS = np.array([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], np.float32)


def test_advantages_are_relative_to_the_group():
    found = advantages(REWARDS, CONFIG)
    deviation = np.std([1, 0, 0, 1], ddof=1) + EPSILON
    np.testing.assert_allclose(found, [*np.array([0.5, -0.5, -0.5, 0.5]) / deviation, 0, 0, 0, 0], rtol=1e-6)
    plain = advantages(REWARDS, dataclasses.replace(CONFIG, scale_rewards=False))
    np.testing.assert_allclose(plain, [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0])
    # Rounding errors of the mean must not become tiny advantages that the division enlarges.
    thirds = advantages(np.full(8, 1 / 3, np.float32), CONFIG)
    assert not thirds.any()


def test_rloo_subtracts_the_mean_of_the_other_responses():
    """Ahmadian et al. 2024, section 3: R(y_i) - 1/(k-1) · Σ_(j≠i) R(y_j)."""
    rewards = np.array([1, 0, 0.25, 0.5, 2, 2, 2, -1], np.float32)
    found = advantages(rewards, dataclasses.replace(CONFIG, advantage_estimator='rloo'))
    expected = [
        rewards[i] - np.delete(rewards[start : start + 4], i - start).mean()
        for start in (0, 4)
        for i in range(start, start + 4)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(found[:4], [0.75, -0.58333333, -0.25, 0.08333333], rtol=1e-6)
    assert np.abs(found - advantages(rewards, dataclasses.replace(CONFIG, scale_rewards=False))).max() > 0.1
    assert not advantages(np.full(8, 1 / 3, np.float32), dataclasses.replace(CONFIG, advantage_estimator='rloo')).any()


TOKEN_REWARDS, TOKEN_VALUES = [-0.1, 0.05, 0.0, 1.0], [0.3, -0.2, 0.5, 0.4]
# gamma and lam → advantages by rlax 0.1.9, truncated_generalized_advantage_estimation with the value 0 after the end.
RLAX = {
    (1.0, 0.95): [0.536675, 1.1965, 0.47, 0.6],
    (0.9, 0.8): [0.07537273, 0.91024, 0.292, 0.6],
}


@pytest.mark.parametrize('key', RLAX)
def test_generalized_advantages_equal_those_of_rlax(key):
    config = dataclasses.replace(CONFIG, advantage_estimator='gae', gamma=key[0], lam=key[1])
    # The prompt, a gap like the result of a tool, and padding.
    predicted = np.array([[0, 1, 1, 0, 0, 1, 1, 0]], np.float32)
    rewards, values = np.full((2, 1, 8), 7.0)
    for array, row in ((rewards, TOKEN_REWARDS), (values, TOKEN_VALUES)):
        array[predicted > 0] = row
    found = generalized_advantages(rewards, values, predicted, config)
    np.testing.assert_allclose(found.advantages[predicted > 0], RLAX[key], rtol=1e-6)
    np.testing.assert_allclose(found.returns[predicted > 0], np.add(RLAX[key], TOKEN_VALUES), rtol=1e-6)
    assert not found.advantages[predicted == 0].any()
    assert not found.returns[predicted == 0].any()


def test_generalized_advantages_with_lambda_1_are_returns_minus_values():
    rng = np.random.default_rng(0)
    rewards, values, predicted = rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), np.ones((3, 5), np.float32)
    found = generalized_advantages(rewards, values, predicted, dataclasses.replace(CONFIG, gamma=1.0, lam=1.0))
    to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(found.returns, to_go, rtol=1e-5)
    np.testing.assert_allclose(found.advantages, to_go - values, rtol=1e-5)
    other = generalized_advantages(rewards, values, predicted, dataclasses.replace(CONFIG, gamma=1.0, lam=0.5))
    assert np.abs(other.advantages - found.advantages).max() > 0.1


def test_whitened_advantages_have_mean_0_and_variance_1():
    rng = np.random.default_rng(1)
    predicted = (rng.random((4, 6)) < 0.6).astype(np.float32)
    found = whitened(rng.normal(3, 2, (4, 6)).astype(np.float32), predicted)
    chosen = found[predicted > 0]
    np.testing.assert_allclose([chosen.mean(), chosen.var(ddof=1)], [0, 1], atol=1e-5)
    assert not found[predicted == 0].any()
    # One token has no variance.
    assert not whitened(np.ones((1, 1), np.float32), np.ones((1, 1))).any()
