"""Pipeline against the plain loop over layers, its communication and memory.

Shapes: S stages, R repeats, P layers of a chunk, L layers, M micro-batches, B batch, T length, D dim, F feed-forward.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlm.model import pipeline
from maxlm.model.pipeline import bubble_fraction, run_pipeline

B, T, D = 4, 4, 8
MESH_AXIS = {'stage': 'stage', 'batch': 'data'}


class Case:
    """A pipeline with inputs on a mesh of stages and `data` devices that share the batch (None: all remaining)."""

    def __init__(self, stages, repeats, micro_batches, *, layers_per_chunk=1, data=None, B=B, T=T, D=D):
        self.stages, self.repeats, M = stages, repeats, micro_batches
        shape = (stages, 8 // stages if data is None else data)
        devices = jax.devices()[: shape[0] * shape[1]]
        self.mesh = jax.make_mesh(shape, ('stage', 'data'), axis_types=(AxisType.Auto,) * 2, devices=devices)
        L, F = stages * repeats * layers_per_chunk, 2 * D
        rng = np.random.default_rng(0)

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        self.params = {'up': normal(L, D, F) / D**0.5, 'down': normal(L, F, D) / F**0.5}
        self.x = normal(M, B, T, D)
        self.side = {'segments': rng.integers(3, size=(M, B, T)), 'dropout': rng.integers(100, size=M)}
        # Weights of a loss that is a weighted sum of the outputs.
        self.weights = normal(M, B, T, D) / self.x.size**0.5

    def place(self, x, *mesh_axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*mesh_axes)))

    def constrain(self, x, axes):
        assert len(axes) == x.ndim
        return self.place(x, *map(MESH_AXIS.get, axes))

    def place_params(self, params_RSP):
        return jax.tree.map(lambda leaf: self.place(leaf, None, 'stage'), params_RSP)

    def run_layer(self, x_BTD, inputs, side):
        params, layer = inputs
        # Without an epsilon the gradient at zero is NaN, which reveals a pipeline that computes on zeros.
        normal_BTD = x_BTD / jnp.sqrt(jnp.square(x_BTD).mean(axis=-1, keepdims=True))
        normal_BTD += side['segments'][..., None]
        y_BTD = jnp.tanh(normal_BTD @ params['up']) @ params['down']
        # Drops a quarter of the width, which differs by micro-batch and layer. JAX's random bits compile slowly.
        keep_D = (jnp.arange(x_BTD.shape[-1]) + side['dropout'] + 2 * layer) % 4 > 0
        return x_BTD + jnp.where(keep_D[None, None], y_BTD, 0), None

    def run(self, params_P, x_BTD, side, first_layer):
        num_layers = params_P['up'].shape[0]
        layer = functools.partial(self.run_layer, side=side)
        return jax.lax.scan(layer, x_BTD, (params_P, first_layer + jnp.arange(num_layers)))[0]

    def run_placed(self, params_P, x_BTD, side, first_layer):
        axes = ('batch', 'length', 'activation')
        return self.constrain(self.run(params_P, self.constrain(x_BTD, axes), side, first_layer), axes), None

    def pipelined(self, params, x, side, **overrides):
        options = {'constrain': self.constrain, 'place_params': self.place_params, **overrides}
        return run_pipeline(self.run_placed, params, x, side, stages=self.stages, repeats=self.repeats, **options)[0]

    def plain(self, params, x, side):
        return jax.lax.map(lambda inputs: self.run(params, *inputs, 0), (x, side))

    def values(self, function):
        return jax.jit(function)(self.params, self.x, self.side)

    def gradients(self, function, **partitioning):
        """Returns a function of (params, x) that computes the result and both gradients."""

        def loss(params, x):
            y = function(params, x, self.side)
            return (y * self.weights).sum(), y

        def gradients(params, x):
            (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
            return y, gradients

        return jax.jit(gradients, **partitioning)

    def pipelined_gradients(self, **overrides):
        """Computes gradients with parameters whose layers are sharded over stages."""
        by_layer, replicated = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in (['stage'], []))
        function = functools.partial(self.pipelined, **overrides)
        return self.gradients(
            function, in_shardings=(by_layer, replicated), out_shardings=(replicated, (by_layer, replicated))
        )

    def program(self, **overrides):
        return self.pipelined_gradients(**overrides).lower(self.params, self.x).compile()


def largest_difference(a, b):
    """Returns the largest difference of any array, relative to its largest value."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


SCHEDULES = [
    (stages, repeats, micro_batches)
    for stages in (2, 4, 8)
    for repeats in (1, 2)
    for micro_batches in (stages, 2 * stages, *([3] if repeats == 1 else []))
]


# All numbers of stages, with and without repeats, and various numbers of micro-batches from the number of stages on.
@pytest.mark.parametrize(
    ('stages', 'repeats', 'micro_batches'),
    [(2, 2, 2), (4, 1, 8), (8, 1, 3), (8, 2, 16), (2, 4, 3), (4, 3, 6)],
)
def test_values_and_gradients_equal_the_plain_loop(stages, repeats, micro_batches):
    case = Case(stages, repeats, micro_batches, layers_per_chunk=2 if stages == 2 else 1)
    expected = jax.device_get(case.gradients(case.plain)(case.params, case.x))
    found = jax.device_get(case.pipelined_gradients()(case.params, case.x))
    assert largest_difference(found, expected) <= 2e-6
    # Negative control: a shift by one position is detected in each array.
    for leaf, same in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert largest_difference(np.roll(leaf, 1, axis=0), same) > 0.1


def test_chunks_are_assigned_round_robin_to_stages():
    case = Case(2, 4, 5, layers_per_chunk=2)
    R, S, P = 4, 2, 2

    def stage_by_stage(leaf):
        return leaf.reshape(R, S, P, *leaf.shape[1:]).swapaxes(0, 1).reshape(leaf.shape)

    y, plain = case.values(case.pipelined), jax.jit(case.plain)
    assert largest_difference(y, plain(case.params, case.x, case.side)) <= 2e-6
    swapped = jax.tree.map(stage_by_stage, case.params)
    assert largest_difference(y, plain(swapped, case.x, case.side)) > 0.1


@pytest.fixture(scope='module')
def pair():
    """Returns a case, the programs of pipeline and plain loop, and the result of the pipeline."""
    case = Case(4, 2, 5, data=1)
    pipelined, plain = jax.jit(case.pipelined), jax.jit(case.plain)
    return case, pipelined, plain, np.asarray(pipelined(case.params, case.x, case.side))


def test_values_equal_the_plain_loop(pair):
    case, _, plain, y = pair
    assert largest_difference(y, plain(case.params, case.x, case.side)) <= 2e-6
    # Negative control: the order of micro-batches matters.
    assert largest_difference(y, plain(case.params, case.x[::-1], case.side)) > 0.1


@pytest.mark.parametrize('name', ['segments', 'dropout'])
def test_every_micro_batch_uses_its_own_side_inputs(name, pair):
    case, pipelined, plain, before = pair
    other = {**case.side, name: case.side[name].copy()}
    other[name][3] += 1
    after = pipelined(case.params, case.x, other)
    changed = np.abs(before - after).max(axis=(1, 2, 3))
    assert changed[3] > 0.1
    assert np.all(np.delete(changed, 3) == 0)
    assert largest_difference(after, plain(case.params, case.x, other)) <= 2e-6


def test_dropout_depends_on_the_keys():
    case = Case(2, 2, 3)
    case.side = jax.random.split(jax.random.key(1), 3)

    def run(params_P, x_BTD, key, first_layer):
        return x_BTD * jax.random.bernoulli(jax.random.fold_in(key, first_layer), 0.9, x_BTD.shape)

    case.run = run
    pipelined = jax.jit(case.pipelined)
    y = pipelined(case.params, case.x, case.side)
    expected, layer = case.x.copy(), jax.jit(run, static_argnums=0)
    for micro_batch, key in enumerate(case.side):
        for number in range(4):
            expected[micro_batch] = layer(None, expected[micro_batch], key, number)
    np.testing.assert_array_equal(y, expected)
    assert not np.array_equal(y, pipelined(case.params, case.x, case.side[::-1]))


def test_layers_receive_their_numbers():
    case = Case(4, 2, 5)

    def run(params_P, x_BTD, side, first_layer):
        # Each layer adds its parameters at its position of the stream.
        return x_BTD.at[..., first_layer].add(params_P[0]), params_P

    def result(params_L):
        options = {'stages': 4, 'repeats': 2, 'constrain': case.constrain, 'place_params': case.place_params}
        return jax.jit(lambda: run_pipeline(run, params_L, jnp.zeros_like(case.x), None, **options))()

    numbers_L = np.arange(8.0)
    stream, stats_ML = result(numbers_L)
    np.testing.assert_array_equal(stream, np.broadcast_to(numbers_L, case.x.shape))
    assert not np.array_equal(result(numbers_L[::-1])[0], np.broadcast_to(numbers_L, case.x.shape))
    # Statistics are those of the layers, for each micro-batch.
    np.testing.assert_array_equal(stats_ML, np.broadcast_to(numbers_L, stats_ML.shape))


def test_statistics_belong_to_their_micro_batch():
    case = Case(4, 2, 5)

    def run(params_P, x_BTD, side, first_layer):
        return x_BTD + 1, side * 100 + first_layer + jnp.zeros(1)

    options = {'stages': 4, 'repeats': 2, 'constrain': case.constrain, 'place_params': case.place_params}
    _, stats_ML = jax.jit(lambda: run_pipeline(run, jnp.zeros(8), case.x, jnp.arange(5.0), **options))()
    np.testing.assert_array_equal(stats_ML, 100 * np.arange(5)[:, None] + np.arange(8))


def test_the_result_keeps_its_dtype():
    case = Case(2, 1, 2)
    case.params, case.x = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (case.params, case.x))
    y = case.values(case.pipelined)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, case.values(case.plain))


COLLECTIVE = re.compile(
    r'= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(-start)?\('
)


def collectives(compiled):
    """Returns kinds and shapes of a program's collectives within loops and outside."""
    within, outside = [], []
    for computation in re.split(r'\n(?=\S)', compiled.as_text()):
        found = [(kind, re.findall(r'\w+\[[\d,]*\]', shape)) for shape, kind, _ in COLLECTIVE.findall(computation)]
        (outside if computation.startswith('ENTRY') else within).extend(found)
    return within, outside


def kinds(found):
    return [kind for kind, _ in found]


@pytest.mark.parametrize('repeats', [1, 2])
def test_a_loop_only_permutes_activations(repeats):
    case = Case(4, repeats, 8, data=1)
    within, outside = collectives(case.program())
    # One exchange in the forward pass and one in the backward pass.
    assert kinds(within) == ['collective-permute'] * 2
    assert all(shapes == [f'f32[1,{B},{T},{D}]'] for _, shapes in within)
    summed = {shape for kind, shapes in outside for shape in shapes if kind == 'all-reduce'}
    assert summed <= {f'f32[8,{B},{T},{D}]', 'f32[]'}
    # Parameters are only moved with repeats, and never gathered.
    assert ('all-to-all' in kinds(outside)) == (repeats > 1)
    assert set(kinds(outside)) <= (
        {'all-reduce'} if repeats == 1 else {'all-reduce', 'all-to-all', 'collective-permute'}
    )


def test_other_shardings_move_parameters_in_the_loop():
    case = Case(4, 2, 8, data=1)

    def by_width(params_RSP):
        return jax.tree.map(lambda leaf: case.place(leaf, None, None, None, 'stage'), params_RSP)

    within, _ = collectives(case.program(place_params=by_width))
    assert set(kinds(within)) > {'collective-permute'}


def test_shard_map_within_a_layer_stays_on_its_stage():
    case = Case(4, 1, 4, data=2)
    rows, replicated = PartitionSpec('data'), PartitionSpec()

    def feed_forward(x_BTD, params):
        return jnp.tanh(x_BTD @ params['up']) @ params['down']

    def run_layer(x_BTD, inputs, side):
        per_device = jax.shard_map(feed_forward, mesh=case.mesh, in_specs=(rows, replicated), out_specs=rows)
        return x_BTD + per_device(x_BTD, inputs[0]), None

    case.run_layer = run_layer
    expected = case.gradients(case.plain)(case.params, case.x)
    assert largest_difference(case.pipelined_gradients()(case.params, case.x), expected) <= 2e-6
    within, _ = collectives(case.program())
    assert 'all-gather' not in kinds(within)
    # Negative control: without its name, the stage axis is gathered.
    within, _ = collectives(case.program(spmd_axis=None))
    assert 'all-gather' in kinds(within)


def kept_per_micro_batch(repeats, micro_batches):
    """Returns the increase of memory per micro-batch from M to 2 M, in units of streams [B, T, D]."""
    B, T, D = 2, 32, 32
    sizes = []
    for M in (micro_batches, 2 * micro_batches):
        case = Case(4, repeats, M, data=1, layers_per_chunk=2, B=B, T=T, D=D)
        sizes.append(case.program().memory_analysis().temp_size_in_bytes)
    return (sizes[1] - sizes[0]) / micro_batches / (B * T * D * 4)


@pytest.mark.parametrize(('repeats', 'micro_batches'), [(1, 8), (2, 32)])
def test_an_iteration_keeps_only_its_input(repeats, micro_batches):
    # There is also a slot for each micro-batch. If each iteration kept all slots, the growth would increase.
    assert kept_per_micro_batch(repeats, micro_batches) == pytest.approx(repeats + 1, abs=0.1)


def test_without_remat_an_iteration_keeps_more(monkeypatch):
    monkeypatch.setattr(pipeline.jax, 'checkpoint', lambda function, **_: function)
    assert kept_per_micro_batch(1, 8) > 10


def simulated_idle_share(stages, repeats, micro_batches):
    """Simulates the schedule: a stage processes one micro-batch at a time, in the order of repeats, when it arrives."""
    done = {}
    for repeat in range(repeats):
        for micro_batch in range(micro_batches):
            for stage in range(stages):
                index = repeat * micro_batches + micro_batch
                came = done.get((index, stage - 1), 0) if stage else done.get((index - micro_batches, stages - 1), 0)
                done[index, stage] = max(came, done.get((index - 1, stage), 0)) + 1
    return 1 - repeats * micro_batches / max(done.values())


@pytest.mark.parametrize(('stages', 'repeats', 'micro_batches'), [(1, 1, 1), *SCHEDULES, (4, 3, 5)])
def test_the_share_of_idle_time(stages, repeats, micro_batches):
    share = simulated_idle_share(stages, repeats, micro_batches)
    assert bubble_fraction(stages, repeats, micro_batches) == pytest.approx(share, abs=1e-12)
    assert bubble_fraction(stages + 1, repeats, micro_batches) > share


def test_number_of_iterations():
    case = Case(4, 2, 5)
    program = str(jax.make_jaxpr(case.pipelined)(case.params, case.x, case.side))
    lengths = {int(length) for length in re.findall(r'length=(\d+)', program)}
    assert lengths == {1, 13}
    assert bubble_fraction(4, 2, 5) == pytest.approx(1 - 2 * 5 / 13, abs=1e-12)


@pytest.mark.parametrize(
    ('stages', 'repeats', 'micro_batches', 'message'),
    [(4, 2, 3, '3 micro-batches leave'), (4, 3, 4, '8 layers are not 3 repeats of 4 stages')],
)
def test_invalid_schedules(stages, repeats, micro_batches, message):
    case = Case(4, 2, micro_batches)
    case.repeats = repeats
    with pytest.raises(AssertionError, match=message):
        case.pipelined(case.params, case.x, case.side)
