"""Chunked cross-entropy and z-loss against the plain formulas."""

import jax
import numpy as np
import pytest

from maxlm.parallel.partitioning import SINGLE_DEVICE, SingleDevice
from maxlm.training.losses.cross_entropy import cross_entropy

B, T, D, V = 3, 12, 8, 29


def inputs():
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    return hidden, kernel, rng.integers(0, V, (B, T)), (rng.random((B, T)) < 0.8).astype(np.float32)


def plain(hidden, kernel, targets, weights, z_loss=0.0):
    """Returns the sums of each row and their gradients by hidden states and kernel, in float64."""
    hidden, kernel = np.float64(hidden), np.float64(kernel)
    scores = hidden @ kernel
    log_z = np.log(np.exp(scores).sum(-1))
    chosen = np.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    loss_B, z_B = (weights * (log_z - chosen)).sum(1), (weights * log_z**2).sum(1)
    probabilities = np.exp(scores - log_z[..., None])
    slope = (1 + 2 * z_loss * log_z)[..., None] * probabilities - np.eye(V)[targets]
    slope *= weights[..., None]
    return loss_B, z_B, (slope @ kernel.T, np.einsum('btd,btv->dv', hidden, slope))


def chunked(chunk, z_loss=0.0, partitioning=SINGLE_DEVICE):
    """Returns the result of `cross_entropy` and the gradients of its objective."""
    hidden, kernel, targets, weights = inputs()

    def objective(hidden, kernel):
        given = {'partitioning': partitioning, 'chunk': chunk, 'z_loss': z_loss}
        found = cross_entropy(hidden, kernel, targets, weights, **given)
        return found.objective, found

    (_, found), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(hidden, kernel)
    return found, grads


# 5 does not divide 12, so the last chunk is padded. On a GPU, the softmax is computed in one pass.
@pytest.mark.parametrize(('chunk', 'platform'), [(1, 'cpu'), (5, 'cpu'), (12, 'cpu'), (100, 'cpu'), (5, 'gpu')])
def test_value_and_gradients_equal_the_plain_formula(chunk, platform):
    found, grads = chunked(chunk, partitioning=SingleDevice(platform))
    loss_B, _, expected_grads = plain(*inputs())
    np.testing.assert_allclose(found.objective, loss_B.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.loss_B, loss_B, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=2e-6)
    # Negative controls: the sums of rows differ, and an additional weight changes the sum.
    assert len(set(np.round(loss_B, 3))) == B
    hidden, kernel, targets, weights = inputs()
    assert abs(plain(hidden, kernel, targets, np.ones_like(weights))[0].sum() - loss_B.sum()) > 1


@pytest.mark.parametrize(('chunk', 'platform'), [(5, 'cpu'), (12, 'cpu'), (5, 'gpu')])
def test_z_loss_is_a_separate_sum(chunk, platform):
    found, grads = chunked(chunk, z_loss=0.1, partitioning=SingleDevice(platform))
    loss_B, z_B, expected = plain(*inputs(), z_loss=0.1)
    np.testing.assert_allclose(found.loss_B.sum(), loss_B.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.log_z_squared_B, z_B, rtol=1e-5)
    np.testing.assert_allclose(found.objective, loss_B.sum() + 0.1 * z_B.sum(), rtol=1e-5)
    for grad, expected_grad, grad_without in zip(grads, expected, plain(*inputs())[2], strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-5)
        # Negative control: the gradient differs without z-loss.
        assert np.abs(grad - grad_without).max() > 0.1


def test_no_array_of_all_logits_exists():
    hidden, kernel, targets, weights = inputs()

    def largest_with_vocabulary(chunk):
        def loss(hidden, kernel):
            return cross_entropy(hidden, kernel, targets, weights, partitioning=SINGLE_DEVICE, chunk=chunk).objective

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, kernel).compile().as_text()
        shapes = {
            tuple(map(int, part.split(']')[0].split(','))) for part in text.split('f32[')[1:] if part[0].isdigit()
        }
        return max(np.prod(shape) for shape in shapes if V in shape and D not in shape)

    # Chunks of B · 4 tokens have 4 positions of each row.
    assert largest_with_vocabulary(B * 4) == B * 4 * V
    assert largest_with_vocabulary(B * T) == B * T * V
