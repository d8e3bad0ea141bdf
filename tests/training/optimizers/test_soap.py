"""SOAP: updates of the algorithm of arXiv 2409.11321 in NumPy, and the planned memory of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.validation import validate
from maxlm.errors import InputError
from maxlm.planning.estimate.state_bytes import planned_state_bytes, state_bytes
from maxlm.training.optimizers.soap import soap
from maxlm.training.optimizers.user_optimizer import Parameter
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout

BETA1, BETA2, EPSILON, RATE, DECAY = 0.9, 0.95, 1e-8, 0.1, 0.2


def reference(param, grads, *, frequency, right=True):
    """Returns a matrix [I, O] after updates with the formulas of algorithms 3 and 4 of the paper in float64."""
    first = grads[0]
    left_factor, right_factor = (1 - BETA2) * first @ first.T, (1 - BETA2) * first.T @ first
    left_basis = np.linalg.eigh(left_factor)[1]
    right_basis = np.linalg.eigh(right_factor)[1] if right else np.eye(len(right_factor))
    mean, square = np.zeros_like(param), np.zeros_like(param)
    param = param - RATE * DECAY * param
    for t, grad in enumerate(grads[1:], start=1):
        rotated = left_basis.T @ grad @ right_basis
        mean = BETA1 * mean + (1 - BETA1) * grad
        square = BETA2 * square + (1 - BETA2) * rotated**2
        corrected = left_basis.T @ mean @ right_basis / (1 - BETA1**t)
        step = corrected / (np.sqrt(square / (1 - BETA2**t)) + EPSILON)
        param = param - RATE * (left_basis @ step @ right_basis.T + DECAY * param)
        left_factor = BETA2 * left_factor + (1 - BETA2) * grad @ grad.T
        right_factor = BETA2 * right_factor + (1 - BETA2) * grad.T @ grad
        if t % frequency == 0:
            left_basis = np.linalg.qr(left_factor @ left_basis)[0]
            right_basis = np.linalg.qr(right_factor @ right_basis)[0] if right else right_basis
    return param


def gradient(rng, num_rows, num_columns):
    """Returns a matrix of full rank with distinct singular values, whose singular vectors are well-defined."""
    left, _ = np.linalg.qr(rng.normal(size=(num_rows, num_rows)))
    right, _ = np.linalg.qr(rng.normal(size=(num_columns, num_columns)))
    return left @ np.diag(1.0 + np.arange(num_rows)) @ right[:num_rows]


def updated(params, grads, *, frequency, max_dim):
    """Returns stacks of two matrices after updates with the optimizer."""
    axes = ('layers', 'embed', 'ffn')
    described = {name: Parameter(name, x.shape, x.dtype, axes, 'matrix') for name, x in params.items()}
    described['scale'] = Parameter('scale', (3,), jnp.dtype('float32'), ('embed',), 'vector')
    config = OptimizerConfig(name='soap', beta1=BETA1, beta2=BETA2, eps=EPSILON, weight_decay=DECAY)
    optimizer = soap(config, optax.constant_schedule(RATE), described, frequency=frequency, max_dim=max_dim)
    params = {**params, 'scale': jnp.ones(3)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for one in grads:
        updates, state = update({**one, 'scale': jnp.ones(3)}, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize('frequency', [1, 2])
def test_updates_are_those_of_the_paper(frequency):
    rng = np.random.default_rng(0)
    shapes = {'square': (4, 4), 'wide': (4, 6)}
    start = {name: rng.normal(size=(2, *shape)) for name, shape in shapes.items()}
    grads = [
        {name: np.stack([gradient(rng, *shape) for _ in range(2)]) for name, shape in shapes.items()} for _ in range(4)
    ]
    to_jax = {name: jnp.asarray(x, jnp.float32) for name, x in start.items()}
    found, state = updated(to_jax, jax.tree.map(jnp.float32, grads), frequency=frequency, max_dim=5)
    for name in shapes:
        for layer in range(2):
            steps = [one[name][layer] for one in grads]
            expected = reference(start[name][layer], steps, frequency=frequency, right=name == 'square')
            np.testing.assert_allclose(found[name][layer], expected, atol=2e-4)
            # Negative control: bases that never change.
            other = reference(start[name][layer], steps, frequency=9, right=name == 'square')
            assert np.abs(other - expected).max() > 1e-2
    # The larger side of the wide matrices has no preconditioner, and Adam trains the vector without decay.
    sizes = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 3 and leaf.shape[1] == leaf.shape[2]]
    assert (2, 6, 6) not in sizes
    np.testing.assert_allclose(found['scale'], 1 - 4 * RATE, rtol=1e-5)


def test_planned_bytes_equal_those_of_the_state():
    config = small_config(optimizer__name='soap')
    planned = planned_state_bytes(config).moments
    assert planned == state_bytes(abstract_state(config, small_layout(config))).moments
    assert planned > planned_state_bytes(small_config()).moments


def test_training_lowers_the_loss():
    config = small_config(optimizer__name='soap', optimizer__learning_rate=0.01)
    layout = small_layout(config)
    state, step, losses = init_state(config, layout), jax.jit(make_train_step(config, layout)), []
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses[-1] < losses[0] - 0.05


def test_several_devices_are_refused():
    with pytest.raises(InputError, match='soap: supports one device, found 8'):
        small_config(8, optimizer__name='soap')


def test_settings_of_other_optimizers_are_refused():
    for key, value in {'muon_beta2': 0.9, 'moment_dtype': 'int8', 'groups': (('head', 'beta2=0.9'),)}.items():
        with pytest.raises(InputError, match=f'optimizer.{key}='):
            validate(small_config(optimizer__name='soap', **{f'optimizer__{key}': value}))
