"""Muon against its formula layer by layer, orthogonality of its updates, and equality on all meshes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxlm.config.schema import MeshConfig
from maxlm.parallel.layout import Layout, make_layout
from maxlm.training.optimizers.muon import PLAIN, Rescaling, momentum_schedule, num_inputs, scale_by_muon
from maxlm.training.optimizers.orthogonalization import orthogonalize

L, D, N, H, F = 3, 8, 2, 3, 20
# name → (shape of a layer's kernel, axes, inputs and outputs). Kernels are wide, tall, or have two axes on either side.
KERNELS = {
    'query': ((D, N, H), ('embed', 'heads', 'head_dim'), (D, N * H)),
    'out': ((N, H, D), ('heads', 'head_dim', 'embed'), (N * H, D)),
    'up': ((D, F), ('embed', 'ffn'), (D, F)),
    'down': ((F, D), ('ffn', 'embed'), (F, D)),
}
AXES = {('blocks', name): ('layers', *axes) for name, (_, axes, _) in KERNELS.items()}


def random_kernels(seed, layers=L):
    rng = np.random.default_rng(seed)
    return {'blocks': {name: rng.normal(size=(layers, *shape)).astype('f') for name, (shape, _, _) in KERNELS.items()}}


def layout_of(**sizes):
    config = MeshConfig(**{'fsdp': 1, **sizes})
    return make_layout(config, jax.devices()[: math.prod(config.sizes.values())])


def make_muon(layout, warmup_steps=0, moments='float32', axes=AXES, rescaling=PLAIN):
    momentum = momentum_schedule(0.95, warmup_steps=warmup_steps)
    return scale_by_muon(
        axes, momentum=momentum, dtype=jnp.dtype('float32'), layout=layout, moments=moments, rescaling=rescaling
    )


def orthogonal(matrix):
    """Returns five Newton–Schulz steps on a matrix in float64, with the coefficients of Jordan et al. 2024."""
    transposed = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if transposed else matrix
    x = x / (np.sqrt((x**2).sum()) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.T if transposed else x


def reference(grads_of_steps, momentums, *, split=None):
    """Returns the directions of all steps by the formula, one layer at a time."""
    buffers = {}
    for grads, momentum in zip(grads_of_steps, momentums, strict=True):
        directions = {}
        for name, stack in grads['blocks'].items():
            fan_in, fan_out = (split or {}).get(name, KERNELS[name][2])
            for layer, kernel in enumerate(np.array(stack, np.float64)):
                # PyTorch's layout has outputs first.
                grad = kernel.reshape(fan_in, fan_out).T
                buffer = buffers.get((name, layer), np.zeros_like(grad))
                buffer = buffer + (1 - momentum) * (grad - buffer)
                buffers[name, layer] = buffer
                nesterov = grad + momentum * (buffer - grad)
                direction = orthogonal(nesterov) * max(1, grad.shape[0] / grad.shape[1]) ** 0.5
                directions.setdefault(name, []).append(direction.T.reshape(kernel.shape))
        yield {'blocks': {name: np.stack(layers) for name, layers in directions.items()}}


def distance(tree, other):
    """Returns the largest difference of two trees relative to the largest element of each array."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.array(a) - np.array(b)).max() / np.abs(np.array(b)).max() for a, b in pairs)


@pytest.mark.parametrize('warmup_steps', [0, 4])
def test_directions_equal_the_formula(warmup_steps):
    muon = make_muon(layout_of(), warmup_steps=warmup_steps)
    grads = [random_kernels(seed) for seed in range(6)]
    increasing = [0.85, 0.875, 0.9, 0.925, 0.95, 0.95]
    momentums = increasing if warmup_steps else [0.95] * 6
    state = jax.jit(muon.init)(grads[0])
    update = jax.jit(muon.update)
    others = reference(grads, [0.95] * 6 if warmup_steps else increasing)
    # A wrong split treats only one axis of `out` as inputs, instead of two.
    wrong_split = reference(grads, momentums, split={'out': (N, H * D)})
    for step, (grad, expected, other, wrong) in enumerate(
        zip(grads, reference(grads, momentums), others, wrong_split, strict=True)
    ):
        directions, state = update(grad, state)
        assert distance(directions, expected) < 1e-4
        # Negative controls: another momentum changes the result from the second step on; the first has no history.
        assert (distance(other, expected) > 1e-3) == (step > 0)
        assert distance(wrong, expected) > 0.1
    assert int(state.num_updates) == 6


@functools.cache
def directions_of(moments, order):
    """Returns the last direction after twelve gradients in the given order, and the state."""
    rng = np.random.default_rng(0)
    grads = [{'up': {'kernel': rng.normal(size=(2, 32, 128)).astype('f')}} for _ in range(12)]
    axes = {('up', 'kernel'): ('layers', 'embed', 'ffn')}
    muon = make_muon(layout_of(), moments=moments, axes=axes)
    state, update = jax.jit(muon.init)(grads[0]), jax.jit(muon.update)
    for grad in grads[::order]:
        directions, state = update(grad, state)
    return np.array(directions['up']['kernel']), state


@pytest.mark.parametrize(('moments', 'error', 'stored'), [('bfloat16', 0.02, 2), ('int8', 0.2, 1 + 4 / 128)])
def test_a_momentum_in_fewer_bits_gives_nearly_the_same_directions(moments, error, stored):
    (expected, _), (got, state), (other, _) = (
        directions_of(*given) for given in (('float32', 1), (moments, 1), ('float32', -1))
    )
    assert 1e-4 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < error
    assert np.linalg.norm(other - expected) / np.linalg.norm(expected) > 0.5
    assert sum(x.nbytes for x in jax.tree.leaves(state.momentum)) == stored * expected.size


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', [(4, 24, 96), (4, 96, 24)])
@pytest.mark.parametrize(('method', 'low', 'high'), [('newton_schulz', 0.65, 1.25), ('polar_express', 0.78, 1.2)])
def test_rows_or_columns_become_nearly_orthonormal(method, low, high, shape, dtype):
    matrices = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = jax.jit(orthogonalize, static_argnums=1)(matrices.astype(dtype), method)
    assert x.dtype == dtype
    x = np.array(x, np.float32)
    values = np.linalg.svd(x, compute_uv=False)
    assert low < values.min() < values.max() < high
    # Negative controls: the matrices are not orthogonal before, or after division by their norm.
    before = np.linalg.svd(matrices, compute_uv=False)
    assert before.min() > 4
    assert (before / np.linalg.norm(before, axis=1, keepdims=True)).max() < 0.4
    # The update of U S V is approximately U V.
    u, _, v = np.linalg.svd(matrices, full_matrices=False)
    cosines = (u @ v * x).sum((1, 2)) / np.linalg.norm(u @ v, axis=(1, 2)) / np.linalg.norm(x, axis=(1, 2))
    assert cosines.min() > 0.97
    assert ((u @ v)[::-1] * x).sum((1, 2)).max() < 5


@functools.partial(jax.jit, static_argnames='rescaling')
def updated_on_one_device(grads, rescaling=PLAIN):
    """Returns the directions of the first update."""
    muon = make_muon(layout_of(), rescaling=rescaling)
    return muon.update(grads, muon.init(grads))[0]


FULL = Rescaling('polar_express', row_equilibration=True, renormalize=True, beta2=0.9)


@pytest.mark.parametrize('rescaling', [PLAIN, FULL])
def test_a_layer_without_gradient_is_unchanged(rescaling):
    grads = random_kernels(0)
    grads['blocks']['up'][1] = 0
    up = np.asarray(updated_on_one_device(grads, rescaling=rescaling)['blocks']['up'])
    assert np.isfinite(up).all()
    assert not up[1].any()
    assert up[0].all()


def test_axis_names_determine_the_inputs():
    assert {name: num_inputs(axes) for name, (_, axes, _) in KERNELS.items()} == {
        'query': 1,
        'out': 2,
        'up': 1,
        'down': 1,
    }
    with pytest.raises(AssertionError, match='cannot tell inputs from outputs'):
        num_inputs(('heads', 'head_dim'))


# Rounding error of a small singular value in float32 (1e-7), which five iterations enlarge up to 3.4⁵ = 480 times.
ROUNDING = 6e-5
MESHES = [{'fsdp': 4, 'tensor': 2}, {'data': 2, 'fsdp': 2, 'tensor': 2}, {'replica': 2, 'fsdp': 4}]
NIGHTLY_MESHES = [{'fsdp': 8}, {'data': 8}]


def sharded(layout, tree):
    placed = {
        name: jax.device_put(stack, layout.named(*AXES['blocks', name])) for name, stack in tree['blocks'].items()
    }
    return {'blocks': placed}


@pytest.mark.parametrize('rescaling', [PLAIN, FULL], ids=['plain', 'full'])
@pytest.mark.parametrize(
    'sizes', [*MESHES, *(pytest.param(sizes, marks=pytest.mark.nightly) for sizes in NIGHTLY_MESHES)], ids=str
)
def test_every_mesh_equals_one_device(sizes, rescaling):
    # Three layers do not divide over any mesh, eight divide over all.
    for layers in (3, 8):
        grads, others = random_kernels(0, layers), random_kernels(1, layers)
        expected = updated_on_one_device(grads, rescaling=rescaling)
        layout = layout_of(**sizes)
        muon = make_muon(layout, rescaling=rescaling)
        grads = sharded(layout, grads)
        state = muon.init(jax.tree.map(np.asarray, grads))
        momentum = jax.tree.map(lambda zeros, grad: jax.device_put(zeros, grad.sharding), state.momentum, grads)
        directions, state = jax.jit(muon.update)(grads, state._replace(momentum=momentum))
        assert distance(directions, expected) < ROUNDING
        assert distance(updated_on_one_device(others, rescaling=rescaling), expected) > 0.1
        for tree in (directions, state.momentum):
            assert jax.tree.all(jax.tree.map(lambda x, g: x.sharding.is_equivalent_to(g.sharding, x.ndim), tree, grads))
        if rescaling.beta2:
            shapes = {name: x.shape for name, x in state.second_moment['blocks'].items()}
            assert shapes == {'query': (layers, D), 'out': (layers, D), 'up': (layers, F), 'down': (layers, F)}


def collectives(layout, rescaling=PLAIN):
    grads = sharded(layout, random_kernels(0, 8))
    shardings = jax.tree.map(lambda x: x.sharding, grads)
    muon = make_muon(layout, rescaling=rescaling)

    def update(grads):
        return muon.update(grads, muon.init(grads))[0]

    text = jax.jit(update, out_shardings=shardings).lower(grads).compile().as_text()
    return set(re.findall(r' (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(', text))


@pytest.mark.parametrize('sizes', [{'fsdp': 8}, {'fsdp': 4, 'tensor': 2}], ids=str)
def test_no_device_gathers_all_layers(sizes, monkeypatch):
    layout = layout_of(**sizes)
    assert collectives(layout) == collectives(layout, FULL) == {'all-to-all'}
    # Negative controls: sharding over both axes at once, and sharding chosen by XLA.
    spread = Layout.spread_matrices
    if len(sizes) > 1:
        monkeypatch.setattr(Layout, 'spread_matrices', lambda self, axes, num: (spread(self, axes, num)[0][::3], 8))
        assert 'all-gather' in collectives(layout)
    monkeypatch.setattr(Layout, 'spread_matrices', lambda self, axes, num: ([], 1))
    assert 'all-gather' in collectives(layout)


def test_layers_are_sharded_over_the_replicas_of_a_parameter():
    layout = layout_of(replica=2, fsdp=2, tensor=2)
    placements, parts = layout.spread_matrices(AXES['blocks', 'out'], 1)
    assert parts == 4
    assert placements[0] == layout.named(*AXES['blocks', 'out'])
    last = placements[-1]
    assert isinstance(last, NamedSharding)
    assert last.shard_shape((8, N, H, D)) == (2, N, H, D)
