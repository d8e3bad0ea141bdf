"""Tests the one-pass softmax with logits of all sizes, and that a GPU uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.parallel.partitioning import SingleDevice
from maxlm.training.losses.cross_entropy import cross_entropy
from maxlm.training.losses.online_softmax import online_softmax

PADDING = float(jnp.finfo(jnp.float32).min)
# In float32, exp(x) overflows above 88.7. The running maximum rises and falls within a row.
ROWS = {
    'small': [0.5, -1.0, 2.0, 0.0],
    'large': [500.0, -1e4, 501.0, 499.0],
    'falling': [1e30, 1.0, 0.0, -1e30],
    'padded': [3.0, 2.5, PADDING, PADDING],
    'padding first': [PADDING, PADDING, 3.0, 2.5],
    'impossible': [-np.inf, 1.0, -np.inf, 2.0],
}


@pytest.mark.parametrize('name', ROWS)
def test_values_and_gradients_are_those_of_the_formula(name):
    scores, target = np.float32(ROWS[name]), 3

    def loss(scores):
        log_z, logit = online_softmax(scores, jnp.array([target]))
        return (log_z - 3 * logit)[0], log_z[0]

    (_, log_z), gradient = jax.value_and_grad(loss, has_aux=True)(scores[None])
    shifted = np.float64(scores) - np.float64(scores).max()
    expected = scores.max() + np.log(np.exp(shifted).sum())
    np.testing.assert_allclose(log_z, expected, rtol=1e-6)
    probabilities = np.exp(shifted) / np.exp(shifted).sum()
    np.testing.assert_allclose(gradient[0], probabilities - 3 * np.eye(4)[target], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_values_that_are_not_finite_are_kept(value):
    log_z, _ = online_softmax(jnp.array([[1.0, value, 2.0]]), jnp.array([0]))
    assert not np.isfinite(log_z).any()


@pytest.mark.parametrize(('platform', 'is_separate'), [('gpu', False), ('cpu', True)])
def test_only_a_gpu_needs_no_separate_maximum(platform, is_separate):
    def loss(hidden):
        given = {'partitioning': SingleDevice(platform), 'chunk': 4}
        return cross_entropy(hidden, jnp.ones((3, 7)), jnp.zeros((1, 4), int), jnp.ones((1, 4)), **given).objective

    assert ('reduce_max' in str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1, 4, 3))))) == is_separate
