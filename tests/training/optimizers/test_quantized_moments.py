"""Moments in bfloat16 and 8 bits: error bounds, rounding, memory and partitioning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlm.training.optimizers import quantized_moments
from maxlm.training.optimizers.optimizer import make_optimizer, scale_by_adam
from maxlm.training.optimizers.quantized_moments import (
    Blocks,
    init_moment,
    load_moment,
    num_blocks,
    place_moment,
    rounding_noise,
    rounding_seed,
    store_moment,
)
from tests.small import small_config, small_layout

STORED = ('bfloat16', 'int8')
# Replaces the random bits of stochastic rounding, so that values are rounded to the nearest.
NEAREST = 0x8000


@functools.partial(jax.jit, static_argnames=('stored', 'signed', 'nearest'))
def store_jitted(values, seed, *, stored, signed, nearest):
    noise = rounding_noise(rounding_seed(seed, 0), jnp.arange(len(values)), values.shape[1:])
    noise = jnp.full_like(noise, NEAREST) if nearest else noise
    return store_moment(values, init_moment(values, stored, signed=signed), noise)


def store(values, stored='int8', *, signed=True, seed=0, nearest=False):
    """Returns the stored moment of values."""
    values = np.asarray(values, np.float32)
    return store_jitted(values, np.int32(seed), stored=stored, signed=signed, nearest=nearest)


@jax.jit
def load_jitted(moment):
    return load_moment(moment)


def load(moment):
    """Returns the values of a moment on the host."""
    return np.asarray(load_jitted(moment))


def scale_of(values, moment):
    """Returns the largest element of the block of each value."""
    block = -(-values.shape[-1] // moment.scales.shape[-1])
    return np.repeat(np.array(moment.scales), block, axis=-1)[..., : values.shape[-1]]


def signed_bound(values, scale):
    values, scale = np.float64(values), np.float64(scale)
    return (2 * np.sqrt(np.abs(values) * scale) / 127 + scale / 127**2) * (1 + 1e-5)


def positive_bound(values, scale):
    values, scale = np.float64(values), np.float64(scale)
    ratio = np.divide(values, scale, out=np.ones_like(values), where=scale > 0)
    k = np.maximum(np.floor(259 * ratio**0.25 * (1 - 1e-6)), 4)
    return ((1 + 1 / k) ** 4 - 1) * np.maximum(values, (4 / 259) ** 4 * scale) * (1 + 1e-5)


def difficult(kind, shape, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    if kind == 'wide':
        values *= 10.0 ** rng.uniform(-18, 18, shape)
    elif kind == 'outlier':
        values[..., 3] *= 1e6
    elif kind == 'rare':
        values *= rng.random(shape) < 0.01
    elif kind == 'tiny':
        values *= 10.0 ** rng.uniform(-45, -25, shape)
    elif kind == 'zeros':
        values *= -0.0
    return values.astype(np.float32)


@pytest.mark.parametrize('kind', ['normal', 'wide', 'outlier', 'rare', 'tiny', 'zeros'])
def test_the_error_is_within_its_bound(kind):
    # The shapes have blocks of 128, blocks of 96, and a shorter last block.
    for seed, shape in enumerate([(4, 8, 256), (12, 768), (20, 257)]):
        values = difficult(kind, shape, seed)
        moment = store(values, seed=seed)
        scale, loaded = scale_of(values, moment), load(moment)
        lost = np.float32(quantized_moments.TINY)
        assert (np.abs(loaded - values) <= np.maximum(signed_bound(values, scale), lost)).all()
        assert np.isfinite(loaded).all()
        assert (loaded * np.sign(values) >= 0).all()

        squares = np.abs(values)
        moment = store(squares, signed=False, seed=seed)
        scale, loaded = scale_of(squares, moment), load(moment)
        assert (np.abs(loaded - squares) <= np.maximum(positive_bound(squares, scale), lost)).all()
        # Values are never zero, which would cause divisions by zero, unless the entire block is zero.
        assert (loaded >= (4 / 259) ** 4 * scale * (1 - 1e-6)).all()
        assert (scale[squares >= 2 * quantized_moments.TINY] > 0).all()


def test_a_linear_code_and_one_scale_break_the_bound():
    values = np.abs(difficult('wide', (12, 768), 0))
    scale = scale_of(values, store(values))
    linear = np.round(values / scale * 127) / 127 * scale
    assert (np.abs(linear - values) > signed_bound(values, scale)).any()
    assert (linear[values > 0] == 0).any()
    flat = load(store(values.reshape(1, -1)[:, :9215])).reshape(-1)
    one = np.square(np.round(np.sqrt(values / values.max()) * 127) / 127) * values.max()
    assert (np.abs(one - values) > signed_bound(values, scale)).any()
    assert (
        np.abs(flat - values.reshape(-1)[:9215]) <= signed_bound(values, np.float32(values.max())).reshape(-1)[:9215]
    ).all()


@pytest.mark.parametrize('stored', STORED)
@pytest.mark.parametrize('signed', [True, False])
def test_rounding_is_unbiased(stored, signed):
    row = difficult('normal', (1, 256), 0)
    row = row if signed else np.abs(row) + 0.05
    # Rows have equal values and different noise.
    values = np.repeat(row, 4096, axis=0)
    mean = load(store(values, stored, signed=signed)).mean(axis=0)
    nearest = load(store(values, stored, signed=signed, nearest=True)).mean(axis=0)
    error, biased = (np.abs(x - row[0]).mean() for x in (mean, nearest))
    assert error < biased / 10
    # Another update rounds differently.
    once, again, other = (load(store(values, stored, signed=signed, seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert (once != other).mean() > 0.1


def test_noise_is_random_in_both_halves_and_from_update_to_update():
    @functools.partial(jax.jit, static_argnums=1)
    def draw(update, index):
        return rounding_noise(rounding_seed(update, index), jnp.arange(64), (1024,))

    draws = [np.asarray(draw(np.int32(n), i)) for n, i in ((1, 0), (2, 0), (1, 1))]
    halves = [np.float64(half).ravel() for x in draws for half in (x & 0xFFFF, x >> 16)]
    for half in halves:
        assert abs(half.mean() / 65535 - 0.5) < 0.005
        assert abs(half.std() / 65535 - 12**-0.5) < 0.005
    shifted = [*halves, halves[0][1:], halves[0][1024:]]
    for number, half in enumerate(shifted):
        for other in shifted[:number]:
            size = min(len(half), len(other))
            assert abs(np.corrcoef(half[:size], other[:size])[0, 1]) < 0.02


@pytest.mark.parametrize('stored', STORED)
def test_the_second_moment_follows_gradients_that_become_small(stored):
    # With beta2 = 0.999, updates are smaller than the distance between adjacent numbers.
    shape, beta2, steps = (16, 256), 0.999, 1500
    start = np.random.default_rng(0).uniform(0.5, 1, shape).astype(np.float32)
    start[:, ::128] = 1

    def shrink(nearest):
        def step(n, moment):
            noise = rounding_noise(rounding_seed(n, 0), jnp.arange(shape[0]), shape[1:])
            # One element of each block keeps its size.
            square = jnp.zeros(shape).at[:, ::128].set(start[:, ::128])
            noise = jnp.full_like(noise, NEAREST) if nearest else noise
            return store_moment(beta2 * load_moment(moment) + (1 - beta2) * square, moment, noise)

        moment = store(start, stored, signed=False)
        after = jax.jit(lambda m: jax.lax.fori_loop(0, steps, step, m))(moment)
        return np.delete(load(after) / start, [0, 128], axis=1)

    exact = beta2**steps
    ratios = shrink(nearest=False)
    assert abs(ratios.mean() / exact - 1) < 0.05
    assert np.abs(ratios / exact - 1).max() < 1
    assert shrink(nearest=True).mean() > 3 * exact


def adam(stored, layout=None, axes=('layers', 'embed', 'ffn'), beta2=0.95):
    return scale_by_adam(
        beta1=0.9,
        beta2=beta2,
        epsilon=1e-8,
        moments=stored,
        axes={('kernel',): axes},
        layout=layout or small_layout(small_config()),
    )


def gradients(shape, seed):
    rng = np.random.default_rng(seed)
    return {'kernel': (rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape)).astype(np.float32)}


def run(optimizer, shape, *, steps=3, first=0, place=lambda tree: tree):
    grads = place(gradients(shape, 0))
    state = jax.jit(optimizer.init)(grads)
    update = jax.jit(optimizer.update)
    for step in range(steps):
        directions, state = update(place(gradients(shape, first + step)), state)
    return jax.device_get((directions, state))


@pytest.mark.parametrize(('stored', 'error'), [('bfloat16', 0.01), ('int8', 0.06)])
def test_directions_are_near_those_of_float32(stored, error):
    (exact, _), (got, _) = (run(adam(kind), (2, 64, 256), steps=20) for kind in ('float32', stored))
    (other, _) = run(adam('float32'), (2, 64, 256), steps=20, first=1)
    exact, got, other = (tree['kernel'] for tree in (exact, got, other))

    def distance(x):
        return np.linalg.norm(x - exact) / np.linalg.norm(exact)

    assert 1e-4 < distance(got) < error
    assert distance(other) > 0.3


def test_small_gradients_beside_large_ones_do_not_blow_up():
    # A millionth of the block's maximum; its square is far below the smallest code.
    kernel = np.full((1, 32, 256), 1e-6, np.float32)
    kernel[..., ::64] = 1.0
    optimizer = adam('int8')
    state, update = jax.jit(optimizer.init)({'kernel': kernel}), jax.jit(optimizer.update)
    for _ in range(8):
        directions, state = update({'kernel': kernel}, state)
    assert np.abs(directions['kernel']).max() < 1.1
    # Negative control: a code with zero divides by epsilon.
    mu, nu = load(state.mu['kernel']), load(state.nu['kernel'])
    linear = np.round(nu * 255) / 255
    assert (np.abs(mu + 1e-7) / (np.sqrt(linear) + 1e-8)).max() > 5


@pytest.mark.parametrize(
    ('size', 'number'),
    [
        (4096, 16),
        (768, 8),
        (512, 4),
        (11008, 64),
        (50304, 384),
        (128, 1),
        (64, 1),
        (8, 1),
        # A prime number.
        (257, 2),
        (50257, 197),
    ],
)
def test_blocks_follow_from_the_size(size, number):
    assert num_blocks(size) == number
    values = np.random.default_rng(0).normal(size=(-(-4096 // size), size))
    moment = store(values)
    assert moment.scales.shape == (*values.shape[:-1], number)
    assert moment.codes.shape == values.shape
    blocks = np.abs(np.pad(values, [(0, 0), (0, -size % number)])).reshape(len(values), number, -1)
    np.testing.assert_array_equal(moment.scales, blocks.max(axis=-1).astype(np.float32))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_bytes_of_the_state(name):
    layers, dim, ffn, vocab = 2, 2048, 8192, 32000
    shapes = {
        ('embedding',): ((vocab, dim), ('vocab', 'embed')),
        ('blocks', 'query', 'kernel'): ((layers, dim, 16, 128), ('layers', 'embed', 'heads', 'head_dim')),
        ('blocks', 'up', 'kernel'): ((layers, dim, ffn), ('layers', 'embed', 'ffn')),
        ('blocks', 'norm', 'scale'): ((layers, dim), ('layers', 'norm')),
    }
    params = {'blocks': {'query': {}, 'up': {}, 'norm': {}}}
    for (*folders, last), (shape, _) in shapes.items():
        node = params
        for folder in folders:
            node = node[folder]
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    matrices = layers * dim * (2048 + ffn)
    vectors, table = layers * dim, vocab * dim

    def measure(stored):
        config = small_config(optimizer__name=name, optimizer__moment_dtype=stored)
        optimizer = make_optimizer(
            config,
            {path: axes for path, (_, axes) in shapes.items()},
            small_layout(config),
            optax.constant_schedule(1e-2),
        )
        return bytes_of(jax.eval_shape(optimizer.init, params)) - 8 * vectors

    of_matrices = {'adamw': 2, 'muon': 1}[name]
    moments_stored = of_matrices * matrices + 2 * table
    # The state also contains two or three counters.
    for stored, each in (('float32', 4), ('bfloat16', 2)):
        assert 0 < measure(stored) - each * moments_stored <= 16
    assert 1.0156 < measure('int8') / moments_stored < 1.02


def test_vectors_and_small_arrays_stay_in_float32():
    config = small_config(optimizer__moment_dtype='int8')
    shapes = {'embedding': (64, 64), 'head': {'kernel': (64, 63)}, 'blocks': {'norm': {'scale': (64, 256)}}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    axes = {('embedding',): ('vocab', 'embed'), ('head', 'kernel'): ('embed', 'vocab')}
    state = jax.eval_shape(
        make_optimizer(config, axes, small_layout(config), optax.constant_schedule(1e-2)).init, params
    )
    for name, dtype in (('mu', jnp.int8), ('nu', jnp.uint8)):
        tree = optax.tree.get(state, name)
        assert tree['embedding'].codes.dtype == dtype
        assert tree['head']['kernel'].dtype == jnp.float32
        assert tree['blocks']['norm']['scale'].dtype == jnp.float32


LAYOUTS = [{'mesh__fsdp': 8}, {'mesh__replica': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2}]


@functools.cache
def on_one_device(stored, axes, first=0):
    """Returns the state after three updates."""
    return run(adam(stored, axes=axes), (2, 64, 256), first=first)[1]


# Two blocks over eight devices, two devices or one.
AXES = [('layers', 'embed', 'ffn'), ('layers', 'ffn', 'embed')]


@pytest.mark.parametrize('stored', STORED)
@pytest.mark.parametrize('sizes', LAYOUTS, ids=str)
def test_every_mesh_stores_the_same_bits(sizes, stored):
    layout = small_layout(small_config(num_devices=8, **sizes))
    for axes in AXES:
        place = functools.partial(jax.device_put, device=layout.named(*axes))
        _, found = run(adam(stored, layout, axes), (2, 64, 256), place=place)
        single = on_one_device(stored, axes)
        jax.tree.map(np.testing.assert_array_equal, found, single)
        # Negative control: other gradients give other bits.
        other = on_one_device(stored, AXES[0], first=1)
        assert not np.array_equal(jax.tree.leaves(other.mu)[0], jax.tree.leaves(single.mu)[0])


@pytest.mark.parametrize('stages', [1, 2])
def test_layer_by_layer_is_the_same(stages, monkeypatch):
    shape, layout = (4, 64, 128), small_layout(small_config())
    _, state_of_all = expected = run(adam('int8'), shape)
    monkeypatch.setattr(quantized_moments, 'STREAMED', 1)
    monkeypatch.setattr(type(layout), 'num_shards', lambda self, axis: stages if axis == 'layers' else 1)
    streamed = run(adam('int8'), shape)
    jax.tree.map(np.testing.assert_array_equal, streamed, expected)
    # Negative controls: the update was streamed, and layers have different noise.
    optimizer = adam('int8')
    state = jax.eval_shape(optimizer.init, gradients(shape, 0))
    text = jax.jit(optimizer.update).lower(gradients(shape, 0), state).as_text()
    assert f'tensor<{stages}x{4 // stages}x64x128xi8>' in text
    alike = np.broadcast_to(np.linspace(0.1, 1, 128), (4, 64, 128))
    stored = store(alike).codes
    assert (stored[0] != stored[1]).any()
    assert isinstance(state_of_all.mu['kernel'], Blocks)


def test_a_large_stack_is_updated_without_float32_moments_of_all_layers(monkeypatch):
    shape = (16, 512, 1024)
    size = int(np.prod(shape))

    def temporary(streamed):
        monkeypatch.setattr(quantized_moments, 'STREAMED', streamed)
        optimizer = adam('int8')
        grads = {'kernel': jax.ShapeDtypeStruct(shape, jnp.float32)}
        state = jax.eval_shape(optimizer.init, grads)
        compiled = jax.jit(optimizer.update).lower(grads, state).compile()
        return compiled.memory_analysis().temp_size_in_bytes / size

    # Temporary bytes per element when one of sixteen layers is updated at a time, and when all are.
    assert temporary(2**22) < 2
    assert temporary(2**30) > 3.5


def test_placement():
    layout = small_layout(small_config(num_devices=8, mesh__fsdp=4, mesh__tensor=2))

    def place(shape, axes, stored='int8'):
        sharding = layout.named(*axes)
        moment = jax.eval_shape(lambda: init_moment(jax.ShapeDtypeStruct(shape, jnp.float32), stored, signed=True))
        placed = place_moment(moment, sharding)
        for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(moment), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert x.sharding.shard_shape(x.shape)
        return placed

    axes = ('layers', 'ffn', 'embed')
    divides = place((2, 64, 1024), axes)
    assert divides.codes.sharding == divides.scales.sharding == layout.named(*axes)
    # Two blocks do not divide over four fsdp devices, so the first axis that divides is sharded, or none.
    assert place((4, 64, 256), axes).scales.sharding.spec == P(('fsdp', 'expert', 'context'), 'tensor', None)
    assert place((2, 64, 256), axes).scales.sharding.spec == P('stage', 'tensor', None)
    assert place((2, 64, 256), axes).codes.sharding == layout.named(*axes)
    for stored in ('float32', 'bfloat16'):
        placed = place((2, 64, 1024), axes, stored)
        assert isinstance(placed, jax.ShapeDtypeStruct)
        assert placed.sharding == layout.named(*axes)
    assert isinstance(divides.scales.sharding, NamedSharding)
