"""Log-probabilities per token against a plain log-softmax, with arbitrary gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.forward import make_log_probs
from maxlm.training.gradients import split_micro_batches
from maxlm.training.losses.cross_entropy import cross_entropy
from maxlm.training.losses.log_probs import token_log_probs
from tests.small import small_batch, small_config, small_layout, small_state

B, T, D, V = 4, 12, 8, 17


@pytest.fixture(scope='module')
def inputs():
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    targets, cotangent = rng.integers(0, V, (B, T)).astype(np.int32), rng.normal(size=(B, T)).astype(np.float32)
    return hidden, kernel, targets, cotangent


def plain(hidden, kernel, targets, cap=0.0):
    scores = hidden @ kernel
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    return jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(('chunk', 'cap'), [(3, 0.0), (5, 4.0), (64, 0.0)])
def test_values_and_gradients_equal_log_softmax(inputs, chunk, cap):
    hidden, kernel, targets, cotangent = inputs

    def ours(hidden, kernel):
        found = token_log_probs(hidden, kernel, targets, partitioning=SINGLE_DEVICE, chunk=chunk, logit_softcap=cap)
        # This loss is no sum over tokens.
        return jnp.square((found.log_probs_BT * cotangent).sum(axis=1)).sum()

    def theirs(hidden, kernel):
        return jnp.square((plain(hidden, kernel, targets, cap) * cotangent).sum(axis=1)).sum()

    both = jax.jit(lambda *given: [jax.value_and_grad(f, argnums=(0, 1))(*given) for f in (ours, theirs)])
    found, expected = both(hidden, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    assert min(np.abs(gradient).max() for gradient in expected[1]) > 1


def test_entropies(inputs):
    hidden, kernel, targets, _ = inputs

    def entropy(hidden):
        found = token_log_probs(hidden, kernel, targets, partitioning=SINGLE_DEVICE, chunk=5).entropies_BT
        return found.sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(entropy, has_aux=True))(hidden)
    scores = np.float64(hidden @ kernel)
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-4, atol=1e-5)
    assert not gradient.any()


def test_sum_is_the_cross_entropy(inputs):
    hidden, kernel, targets, _ = inputs

    @jax.jit
    def both(targets):
        given = {'partitioning': SINGLE_DEVICE, 'chunk': 4}
        loss = cross_entropy(hidden, kernel, targets, jnp.ones((B, T)), **given).loss_B
        return loss, token_log_probs(hidden, kernel, targets, **given).log_probs_BT

    loss, found = both(targets)
    np.testing.assert_allclose(-found.sum(axis=1), loss, rtol=1e-6)
    _, shifted = both(np.roll(targets, 1, 1))
    assert np.abs(-shifted.sum(axis=1) - loss).max() > 0.1


def log_probs_of(num_devices, **mesh):
    """Returns the sorted log-probabilities and entropies [2, tokens] of a batch."""
    settings = {'model__num_layers': 1, 'model__logit_softcap': 5.0, 'train__per_device_batch_size': 4}
    config = small_config(num_devices=num_devices, **settings, **mesh)
    layout = small_layout(config)
    placed = layout.put_batch(small_batch(config), 8)

    @jax.jit
    def run(params, batch):
        if layout.num_shards('length') > 1:
            # Orders the sequence as the step does.
            batch = {name: rows[0] for name, rows in split_micro_batches(batch, 1, layout).items()}
        found = make_log_probs(config, layout)(params, None, batch, None)
        return jnp.stack([found.log_probs_BT, found.entropies_BT])

    return np.sort(np.asarray(run(small_state(config, layout).params, placed)).reshape(2, -1))


@pytest.fixture(scope='module')
def on_one_device():
    return log_probs_of(1)


# With `mesh.tensor` the vocabulary is padded.
@pytest.mark.parametrize('mesh', [{'mesh__fsdp': 2, 'mesh__tensor': 2}, {'mesh__fsdp': 2, 'mesh__context': 2}])
def test_every_mesh_equals_one_device(on_one_device, mesh):
    np.testing.assert_allclose(log_probs_of(4, **mesh), on_one_device, atol=2e-5)
