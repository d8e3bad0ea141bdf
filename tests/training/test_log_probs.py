"""Log-probabilities by token: those of a plain log-softmax, with any gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.model.placement import ONE_DEVICE
from maxlm.training.log_probs import token_log_probs
from maxlm.training.loss import cross_entropy
from maxlm.training.objectives import make_log_probs
from maxlm.training.state import init_state
from maxlm.training.step import split_micro_batches
from tests.small import small_batch, small_config, small_layout

B, T, D, V = 4, 12, 8, 17


@pytest.fixture(scope='module')
def inputs():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    cotangent = jnp.asarray(rng.normal(size=(B, T)), jnp.float32)
    return hidden, kernel, targets, cotangent


def plain(hidden, kernel, targets, cap=0.0):
    scores = hidden @ kernel
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    return jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize('chunk', [3, 5, 64])
@pytest.mark.parametrize('cap', [0.0, 4.0])
def test_values_and_gradients_are_those_of_log_softmax(inputs, chunk, cap):
    hidden, kernel, targets, cotangent = inputs

    def ours(hidden, kernel):
        found = token_log_probs(hidden, kernel, targets, placement=ONE_DEVICE, chunk=chunk, logit_softcap=cap)
        # A loss that is no sum over tokens.
        return jnp.square((found.log_probs_BT * cotangent).sum(axis=1)).sum()

    def theirs(hidden, kernel):
        return jnp.square((plain(hidden, kernel, targets, cap) * cotangent).sum(axis=1)).sum()

    found, wanted = (jax.value_and_grad(f, argnums=(0, 1))(hidden, kernel) for f in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, wanted)
    assert min(np.abs(gradient).max() for gradient in wanted[1]) > 1


def test_entropies(inputs):
    hidden, kernel, targets, _ = inputs
    found = token_log_probs(hidden, kernel, targets, placement=ONE_DEVICE, chunk=5).entropies_BT
    log_p = jax.nn.log_softmax(hidden @ kernel)
    np.testing.assert_allclose(found, -(jnp.exp(log_p) * log_p).sum(-1), rtol=1e-4, atol=1e-5)
    gradient = jax.grad(
        lambda x: token_log_probs(x, kernel, targets, placement=ONE_DEVICE, chunk=5).entropies_BT.sum()
    )(hidden)
    assert not gradient.any()


def test_their_sum_is_the_cross_entropy(inputs):
    hidden, kernel, targets, _ = inputs
    ones = jnp.ones((B, T))
    loss = cross_entropy(hidden, kernel, targets, ones, placement=ONE_DEVICE, chunk=4).loss_B
    found = token_log_probs(hidden, kernel, targets, placement=ONE_DEVICE, chunk=4).log_probs_BT
    np.testing.assert_allclose(-found.sum(axis=1), loss, rtol=1e-6)
    shifted = token_log_probs(hidden, kernel, jnp.roll(targets, 1, 1), placement=ONE_DEVICE, chunk=4).log_probs_BT
    assert np.abs(-shifted.sum(axis=1) - loss).max() > 0.1


@pytest.mark.parametrize('mesh', [{'mesh__fsdp': 2, 'mesh__tensor': 2}, {'mesh__fsdp': 2, 'mesh__context': 2}])
def test_on_a_mesh_they_are_those_of_one_device(mesh):
    batch = small_batch(small_config())
    found = []
    for num_devices, overrides in ((1, {}), (4, mesh)):
        config = small_config(num_devices=num_devices, model__vocab_size=64, train__micro_batch=4, **overrides)
        layout = small_layout(config)
        params = init_state(small_config(model__vocab_size=64), small_layout(small_config())).params
        params = jax.tree.map(
            lambda old, new: jax.device_put(np.asarray(old), new.sharding), params, init_state(config, layout).params
        )
        log_probs = jax.jit(make_log_probs(config, layout))
        placed = layout.put_batch(batch, 8)
        if layout.parts('length') > 1:
            # As the step orders the length.
            placed = {name: split_micro_batches(rows, 1, layout)[0] for name, rows in placed.items()}
        values = np.asarray(log_probs(params, None, placed, None).log_probs_BT)
        found.append(np.sort(values.ravel()))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)
