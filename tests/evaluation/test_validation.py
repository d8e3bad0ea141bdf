"""Tests the validation loss: the mean over tokens, regardless of batch sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.evaluation.validation import evaluate
from maxlm.training.objectives import LossSums
from tests.small import small_config, small_layout


def eval_step(params, reference, batch):
    assert reference is None
    loss, tokens = params * jnp.sum(batch['losses'] * batch['weights']), jnp.sum(batch['weights'])
    by_source = jnp.stack([loss, 0 * loss]), jnp.stack([tokens, 0 * tokens])
    return LossSums(loss, tokens, tokens, *by_source, {'twice': 2 * loss}, {'twice': tokens})


def run(batches, num_devices=8):
    layout = small_layout(small_config(num_devices=num_devices))
    return evaluate(jax.jit(eval_step), jnp.float32(1), iter(batches), layout=layout, global_batch=8)


def make_batch(loss, tokens):
    weights = np.zeros((8, 4), np.float32)
    weights.flat[:tokens] = 1
    return {'losses': np.full((8, 4), loss, np.float32), 'weights': weights}


@pytest.mark.parametrize('num_devices', [1, 8])
def test_every_token_counts_the_same(num_devices):
    result = run([make_batch(1.0, 32), make_batch(5.0, 8)], num_devices)
    assert result.loss == pytest.approx((32 * 1 + 8 * 5) / 40)
    assert result.tokens == 40
    assert result.loss != pytest.approx((1 + 5) / 2)
    assert result.parts == pytest.approx({'twice': 2 * result.loss})


def test_sums_over_many_batches_keep_their_digits():
    # In float32 the sum would stop growing: 2²⁴ + 1 = 2²⁴.
    large = {'losses': np.full((8, 4), 2.0**24 / 32, np.float32), 'weights': np.ones((8, 4), np.float32)}
    result = run([large] + [make_batch(1.0, 1)] * 50)
    assert result.loss * result.tokens == pytest.approx(2**24 + 50, abs=0.5)
    assert result.tokens == 32 + 50


def test_batches_without_a_token_to_predict():
    result = run([make_batch(1.0, 0)])
    assert (result.loss, result.tokens) == (0.0, 0)


def test_losses_by_source():
    result = run([make_batch(1.0, 32), make_batch(5.0, 8)])
    first, second = result.source_losses
    assert first == pytest.approx(result.loss)
    assert np.isnan(second)  # NaN, not 0: there were no tokens of this source
