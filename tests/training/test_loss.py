"""Chunked cross-entropy and z-loss against the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.placement import ONE_DEVICE
from maxlm.training.loss import cross_entropy

B, T, D, V = 3, 12, 8, 29


def inputs():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, T)))
    weights = jnp.asarray(rng.random((B, T)) < 0.8, jnp.float32)
    return hidden, kernel, targets, weights


def plain(hidden, kernel, targets, weights):
    probabilities = jax.nn.softmax(hidden @ kernel, axis=-1)
    chosen = jnp.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0]
    return -(weights * jnp.log(chosen)).sum()


def plain_z(hidden, kernel, weights):
    return (weights * jnp.log(jnp.exp(hidden @ kernel).sum(-1)) ** 2).sum()


# 5 does not divide 12: the last chunk is filled up.
@pytest.mark.parametrize('chunk', [1, 4, 5, 12, 100])
def test_value_and_gradients_equal_the_plain_formula(chunk):
    hidden, kernel, targets, weights = inputs()

    def chunked(hidden, kernel):
        return cross_entropy(hidden, kernel, targets, weights, placement=ONE_DEVICE, chunk=chunk).objective

    value, grads = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(hidden, kernel)
    wanted, wanted_grads = jax.value_and_grad(plain, argnums=(0, 1))(hidden, kernel, targets, weights)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(grad, wanted_grad, rtol=1e-4, atol=1e-6)
    # Control: one weight more gives another sum.
    assert abs(plain(hidden, kernel, targets, jnp.ones_like(weights)) - wanted) > 1


@pytest.mark.parametrize('chunk', [5, 12])
def test_z_loss_is_a_sum_of_its_own(chunk):
    hidden, kernel, targets, weights = inputs()

    def chunked(hidden, kernel):
        found = cross_entropy(hidden, kernel, targets, weights, placement=ONE_DEVICE, chunk=chunk, z_loss=0.1)
        return found.objective, (found.loss_B.sum(), found.log_z_squared_B.sum())

    def wanted_sum(hidden, kernel):
        return plain(hidden, kernel, targets, weights) + 0.1 * plain_z(hidden, kernel, weights)

    (_, (loss, z)), grads = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True))(hidden, kernel)
    np.testing.assert_allclose(loss, plain(hidden, kernel, targets, weights), rtol=1e-6)
    np.testing.assert_allclose(z, plain_z(hidden, kernel, weights), rtol=1e-5)
    wanted = jax.grad(wanted_sum, argnums=(0, 1))(hidden, kernel)
    without = jax.grad(plain, argnums=(0, 1))(hidden, kernel, targets, weights)
    for grad, wanted_grad, grad_without in zip(grads, wanted, without, strict=True):
        np.testing.assert_allclose(grad, wanted_grad, rtol=1e-4, atol=1e-5)
        # Control: without the z-loss it is another.
        assert np.abs(grad - grad_without).max() > 0.1


@pytest.mark.parametrize('chunk', [5, 12])
def test_each_row_has_its_own_sum(chunk):
    hidden, kernel, targets, weights = inputs()
    loss_B = cross_entropy(hidden, kernel, targets, weights, placement=ONE_DEVICE, chunk=chunk).loss_B
    rows = [plain(hidden[i : i + 1], kernel, targets[i : i + 1], weights[i : i + 1]) for i in range(B)]
    np.testing.assert_allclose(loss_B, rows, rtol=1e-5)
    assert len(set(np.round(rows, 3))) == B


def test_no_array_of_all_logits_exists():
    hidden, kernel, targets, weights = inputs()

    def largest_with_vocabulary(chunk):
        def loss(hidden, kernel):
            return cross_entropy(hidden, kernel, targets, weights, placement=ONE_DEVICE, chunk=chunk).objective

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, kernel).compile().as_text()
        shapes = {
            tuple(map(int, part.split(']')[0].split(','))) for part in text.split('f32[')[1:] if part[0].isdigit()
        }
        return max(np.prod(shape) for shape in shapes if V in shape and D not in shape)

    assert largest_with_vocabulary(4) == B * 4 * V
    assert largest_with_vocabulary(12) == B * T * V
