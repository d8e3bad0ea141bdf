"""SOAP: updates of the algorithm of arXiv 2409.11321 in NumPy, and the planned memory of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.config.schema import MeshConfig
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.validation import validate
from maxlm.errors import InputError
from maxlm.parallel.layout import make_layout
from maxlm.planning.estimate.state_bytes import planned_state_bytes, state_bytes
from maxlm.training.optimizers.soap import soap
from maxlm.training.optimizers.state_placement import place_state
from maxlm.training.optimizers.user_optimizer import Parameter
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_train_step
from tests.small import small_batch, small_config, small_layout, small_state

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


def updated(params, grads, *, frequency, max_dim, axes=('layers', 'embed', 'ffn'), layout=None):
    """Returns stacks of matrices after updates with the optimizer."""
    described = {name: Parameter(name, x.shape, x.dtype, axes, 'matrix') for name, x in params.items()}
    described['scale'] = Parameter('scale', (3,), jnp.dtype('float32'), ('norm',), 'vector')
    config = OptimizerConfig(name='soap', beta1=BETA1, beta2=BETA2, eps=EPSILON, weight_decay=DECAY)
    schedule = optax.constant_schedule(RATE)
    optimizer = soap(config, schedule, described, frequency=frequency, max_dim=max_dim, layout=layout)
    params = {**params, 'scale': jnp.ones(3)}
    state = optimizer.init(params)
    if layout is not None:
        shardings = {name: layout.named(*param.axes) for name, param in described.items()}
        placed = place_state(state, described, shardings, layout)
        state = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), state, placed)
        params = jax.tree.map(jax.device_put, params, shardings)
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


@pytest.mark.parametrize(
    'mesh',
    [
        {},
        {'num_devices': 8, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'mesh__data': 2},
        {'num_devices': 8, 'mesh__fsdp': 2, 'mesh__stage': 2, 'mesh__context': 2, 'train__per_device_batch_size': 1},
    ],
    ids=str,
)
def test_planned_bytes_equal_those_of_the_state(mesh):
    config = small_config(**mesh, optimizer__name='soap')
    planned = planned_state_bytes(config).moments
    assert planned == state_bytes(abstract_state(config, small_layout(config))).moments
    assert planned > planned_state_bytes(small_config(**mesh)).moments


def test_training_lowers_the_loss():
    config = small_config(optimizer__name='soap', optimizer__learning_rate=0.01)
    layout = small_layout(config)
    state, step, losses = init_state(config, layout), jax.jit(make_train_step(config, layout)), []
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses[-1] < losses[0] - 0.05


CASES = {
    # Three layers for eight devices, and matrices of which only one side has a preconditioner.
    'layers': (('layers', 'embed', 'ffn'), (3, 8, 12), {'fsdp': 4, 'tensor': 2}),
    'experts': (
        ('layers', 'experts', 'expert_embed', 'expert_ffn'),
        (2, 2, 4, 8),
        {'expert': 2, 'context': 2, 'data': 2},
    ),
    'stages': (('layers', 'heads', 'head_dim', 'embed'), (4, 4, 2, 8), {'stage': 2, 'fsdp': 2, 'tensor': 2}),
    'without a sharded axis': (('layers', 'gate_channels', 'kv_heads'), (4, 8, 4), {'fsdp': 4, 'replica': 2}),
}


@pytest.mark.parametrize('case', CASES)
def test_devices_share_the_matrices(case):
    axes, shape, sizes = CASES[case]
    rng = np.random.default_rng(0)
    start, *grads = ({'kernel': jnp.float32(rng.normal(size=shape))} for _ in range(5))
    layout = make_layout(MeshConfig(**{'fsdp': 1, **sizes}), jax.devices()[:8])
    expected, state = updated(start, grads, frequency=2, max_dim=10, axes=axes)
    found, other = updated(start, grads, frequency=2, max_dim=10, axes=axes, layout=layout)
    np.testing.assert_allclose(found['kernel'], expected['kernel'], atol=1e-4)
    # The signs of eigenvectors are the same, because each device runs the same decomposition.
    for one, another in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(another, one, atol=1e-4)


def test_training_on_two_devices_equals_training_on_one():
    losses = []
    for sizes in ({}, {'num_devices': 2, 'mesh__fsdp': 2}):
        config = small_config(**sizes, optimizer__name='soap', optimizer__warmup_steps=0)
        layout = small_layout(config)
        state, step = small_state(config, layout), jax.jit(make_train_step(config, layout))
        batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses[3:5], losses[:2], rtol=2e-6)
    # Gradients of few tokens do not determine all eigenvectors, so from here rounding changes the bases.
    assert losses[5] == pytest.approx(losses[2], rel=2e-3)
    assert losses[2] < 0.99 * losses[1]


def test_settings_of_other_optimizers_are_refused():
    for key, value in {'muon_beta2': 0.9, 'moment_dtype': 'int8', 'groups': (('head', 'beta2=0.9'),)}.items():
        with pytest.raises(InputError, match=f'optimizer.{key}='):
            validate(small_config(optimizer__name='soap', **{f'optimizer__{key}': value}))
