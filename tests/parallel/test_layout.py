"""Tests the layout of arrays: nodes and slices in the mesh, ZeRO, rows of a process, and sharded gradients."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from maxlm.config.schema import MESH_AXES, MeshConfig
from maxlm.errors import InputError
from maxlm.parallel.layout import make_layout, split_across_islands
from maxlm.training.state import abstract_state, param_shardings
from tests.small import small_batch, small_config, small_layout


class Client(NamedTuple):
    """The process that queries devices."""

    process: int

    def process_index(self):
        return self.process


HERE = Client(0)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A fake device with the attributes that a mesh reads."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int | None = None
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    client: Client = HERE


def gpu_nodes(num, *, here=0):
    """Returns nodes of 8 GPUs, with one process each."""
    return [FakeDevice(n, n // 8, 'gpu', 'NVIDIA H100', client=Client(here)) for n in range(8 * num)]


def tpu_slices(num):
    """Returns slices of 4 × 4 chips, with 4 hosts each."""
    chips = [(x, y, 0) for y in range(4) for x in range(4)]
    return [
        FakeDevice(16 * index + n, 4 * index + n // 4, 'tpu', 'TPU v5 lite', slice_index=index, coords=coords)
        for index in range(num)
        for n, coords in enumerate(chips)
    ]


def resolved(**sizes):
    return MeshConfig(**{'fsdp': 1, **sizes})


def axes_across(layout, attribute):
    """Returns the mesh axes along which islands differ."""
    islands = np.vectorize(lambda device: getattr(device, attribute))(layout.mesh.devices)
    return {name for axis, name in enumerate(MESH_AXES) if (islands != islands.take([0], axis=axis)).any()}


@pytest.mark.parametrize(
    ('num_nodes', 'sizes', 'outside'),
    [
        (2, {'replica': 2, 'fsdp': 4, 'tensor': 2}, {'replica'}),
        (4, {'replica': 2, 'data': 2, 'fsdp': 4, 'tensor': 2}, {'replica', 'data'}),
        (2, {'data': 2, 'tensor': 8}, {'data'}),
        (2, {'stage': 2, 'context': 4, 'tensor': 2}, {'stage'}),
        (3, {'data': 6, 'context': 2, 'tensor': 2}, {'data'}),
        # Replicas also split a node: only one factor of the axis crosses nodes.
        (2, {'replica': 4, 'fsdp': 4}, {'replica'}),
        (4, {'fsdp': 32}, {'fsdp'}),
    ],
)
def test_outer_axes_cross_nodes(num_nodes, sizes, outside):
    layout = make_layout(resolved(**sizes), gpu_nodes(num_nodes))
    assert axes_across(layout, 'process_index') == outside
    assert dict(layout.mesh.shape) == resolved(**sizes).sizes
    assert len(set(layout.mesh.devices.flat)) == 8 * num_nodes
    # Mesh order leaves each node only once.
    assert [device.process_index for device in layout.mesh.devices.flat] == sorted(8 * list(range(num_nodes)))


@pytest.mark.parametrize(
    ('sizes', 'outside'),
    [
        ({'data': 2, 'fsdp': 16}, {'data'}),
        ({'replica': 2, 'fsdp': 4, 'tensor': 4}, {'replica'}),
        ({'fsdp': 8, 'context': 2, 'tensor': 2}, {'fsdp'}),
        ({'context': 2, 'tensor': 16}, {'context'}),
    ],
)
def test_outer_axes_cross_slices(sizes, outside):
    assert axes_across(make_layout(resolved(**sizes), tpu_slices(2)), 'slice_index') == outside


def test_hosts_of_one_slice_are_one_island():
    layout = make_layout(resolved(tensor=16), tpu_slices(1))
    assert axes_across(layout, 'process_index') == {'tensor'}
    # Control: nodes of GPUs are separate islands.
    with pytest.raises(InputError, match='2 nodes or slices'):
        make_layout(resolved(tensor=16), gpu_nodes(2))


def test_node_with_a_process_for_each_gpu_is_one_island():
    node = [FakeDevice(n, n, 'gpu', 'NVIDIA H100', slice_index=0) for n in range(8)]
    assert make_layout(resolved(fsdp=4, tensor=2), node).mesh.shape['tensor'] == 2


def test_a_mesh_without_outer_axes_is_refused_on_islands():
    with pytest.raises(InputError) as error:
        make_layout(resolved(data=2, tensor=16), tpu_slices(4)[::2] + tpu_slices(4)[1::2])
    message = str(error.value)
    assert message == (
        'mesh data=2 tensor=16: the product of the axes other than mesh.tensor must be a multiple of the 4 nodes or '
        'slices; set e.g. mesh.replica=4 or mesh.data=4'
    )
    for axis in ('replica', 'data'):
        layout = make_layout(resolved(**{axis: 4, 'tensor': 16}), tpu_slices(4))
        assert axes_across(layout, 'slice_index') == {axis}


@pytest.mark.parametrize(
    ('sizes', 'num_islands', 'across'),
    [
        ((2, 1, 4, 8, 1, 1, 1), 4, (2, 1, 2, 1, 1, 1, 1)),
        ((1, 4, 1, 8, 1, 1, 2), 2, (1, 2, 1, 1, 1, 1, 1)),
        ((4, 1, 3, 1, 1, 1, 8), 6, (2, 1, 3, 1, 1, 1, 1)),
        ((1, 1, 1, 2, 1, 2, 8), 4, (1, 1, 1, 2, 1, 2, 1)),
        ((1, 1, 1, 8, 1, 1, 1), 1, (1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_split_across_islands_by_axis(sizes, num_islands, across):
    named = dict(zip(MESH_AXES, sizes, strict=True))
    assert split_across_islands(named, num_islands) == across
    assert math.prod(across) == num_islands


def split_by(zero, **sizes):
    settings = {'mesh__fsdp': 4, 'mesh__data': 2, 'model__vocab_size': 64, **sizes}
    config = small_config(num_devices=8, model__family='llama', mesh__zero_stage=zero, **settings)
    return config, small_layout(config)


def bytes_on_a_device(tree):
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ('zero', 'split'), [(1, (False, False, True)), (2, (False, True, True)), (3, (True, True, True))]
)
def test_zero_shards_the_state_then_gradients_then_parameters_in_use(zero, split):
    config, layout = split_by(zero)
    layouts = (layout, layout.of_gradients, layout.of_state)
    abstract = abstract_state(config, layout)
    total = sum(param.size for param in jax.tree.leaves(abstract.params))
    # Norm scales are replicated. All other parameters have an axis with the model width.
    named = jax.tree_util.tree_leaves_with_path(abstract.params)
    scales = sum(param.size for path, param in named if path[-1].key == 'scale')
    assert scales == (2 * 2 + 1) * 32
    sharded = scales + (total - scales) // 4
    for is_split, at in zip(split, layouts, strict=True):
        placed = jax.tree.map(
            lambda param, sharding: jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding),
            abstract.params,
            param_shardings(config, at),
        )
        assert bytes_on_a_device(placed) == 4 * (sharded if is_split else total)
        assert at.num_shards('embed') == (4 if is_split else 1)
        embed = ('fsdp', 'expert', 'context') if is_split else None
        assert at.spec(('layers', 'embed', 'ffn')) == PartitionSpec('stage', embed, 'tensor')
    # The state is sharded at every stage.
    assert bytes_on_a_device(abstract.params) == 4 * sharded
    moments = [optax.tree.get(abstract.opt_state, name) for name in ('mu', 'nu')]
    assert bytes_on_a_device(moments) == 2 * 4 * sharded


def test_num_shards_of_axes():
    _, layout = split_by(3, mesh__fsdp=2, mesh__data=1, mesh__context=2, mesh__tensor=2)
    parts = {axis: layout.num_shards(axis) for axis in ('batch', 'rows', 'length', 'embed', 'heads', 'layers', 'norm')}
    assert parts == {'batch': 2, 'rows': 2, 'length': 2, 'embed': 4, 'heads': 2, 'layers': 1, 'norm': 1}
    assert layout.spec(('embed', 'heads', 'head_dim')) == PartitionSpec(('fsdp', 'expert', 'context'), 'tensor', None)
    assert layout.spec(('batch', 'length')) == PartitionSpec(('replica', 'data', 'fsdp', 'expert'), 'context')
    assert layout.spec(()) == PartitionSpec()
    _, layout = split_by(3, mesh__fsdp=2, mesh__data=2, mesh__stage=2, train__per_device_batch_size=1)
    parts = {axis: layout.num_shards(axis) for axis in ('batch', 'rows', 'length', 'embed', 'layers')}
    assert parts == {'batch': 4, 'rows': 8, 'length': 1, 'embed': 2, 'layers': 2}


@pytest.mark.parametrize(('zero', 'is_split'), [(1, False), (2, True), (3, True)])
def test_gathered_parameter_has_a_sharded_gradient(zero, is_split):
    _, layout = split_by(zero)
    axes = ('embed', 'ffn')
    rng = np.random.default_rng(0)
    x_BD = jax.device_put(rng.normal(size=(8, 32)).astype(np.float32), layout.named('batch', 'activation'))
    w_DF = jax.device_put(rng.normal(size=(32, 16)).astype(np.float32), layout.named(*axes))

    gradient = jax.jit(jax.grad(lambda w_DF: jnp.sum(jnp.square(x_BD @ layout.gathered(w_DF, axes)))))(w_DF)
    expected = 2 * np.asarray(x_BD).T @ (np.asarray(x_BD) @ np.asarray(w_DF))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-3)
    shapes = {shard.data.shape for shard in gradient.addressable_shards}
    assert shapes == ({(8, 16)} if is_split else {(32, 16)})
    # The parameter is complete where it is used, whether it is stored in shards or not.
    gathered_DF = jax.jit(lambda w_DF: layout.gathered(w_DF, axes))(w_DF)
    assert {shard.data.shape for shard in gathered_DF.addressable_shards} == {(32, 16)}
    assert w_DF.addressable_shards[0].data.shape == ((8, 16) if zero == 3 else (32, 16))
    # Control: arrays that no mesh axis shards are returned unchanged.
    assert layout.gathered(w_DF, ('ffn', 'norm')) is w_DF
    assert split_by(zero, mesh__fsdp=1, mesh__data=8)[1].gathered(w_DF, axes) is w_DF


@pytest.mark.parametrize(('zero', 'gathers', 'scatters'), [(1, 0, 0), (2, 0, 1), (3, 1, 1)])
def test_gradients_of_arguments_per_shard_are_reduce_scattered(zero, gathers, scatters):
    layout = make_layout(MeshConfig(data=2, fsdp=2, context=2, zero_stage=zero))
    axes = [('batch', 'activation'), ('expert_embed', 'ffn')]

    def loss(x_BD, kernel_DF):
        product = layout.per_shard(lambda x, kernel: jnp.sin(x @ kernel), axes, ('batch', 'ffn'))
        return product(x_BD, kernel_DF).sum()

    rng = np.random.default_rng(0)
    x_BD, kernel_DF = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4), (4, 6)))
    gradient = jax.jit(jax.grad(loss, argnums=1))
    np.testing.assert_allclose(gradient(x_BD, kernel_DF), x_BD.T @ jnp.cos(x_BD @ kernel_DF), rtol=1e-5)
    text = gradient.lower(x_BD, kernel_DF).as_text()
    # Without a scatter, the complete gradient is all-reduced.
    assert text.count('stablehlo.all_gather') == gathers
    assert text.count('stablehlo.reduce_scatter') == scatters


@pytest.mark.parametrize(('zero', 'gradient_parts'), [(1, 2), (2, 8), (3, 8)])
def test_indivisible_vocabulary_is_padded_only_in_use(zero, gradient_parts):
    config, layout = split_by(zero, mesh__data=1, mesh__tensor=2, model__vocab_size=61)
    abstract = abstract_state(config, layout)
    # The state has the shapes of a single device. Devices of the vocabulary axis split the width.
    one_device = small_config(model__vocab_size=61, model__family='llama')
    shapes, expected = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state.params, state.opt_state))
        for state in (abstract, abstract_state(one_device, small_layout(one_device)))
    )
    assert shapes == expected
    kernel, axes = abstract.params['head']['kernel'], ('embed', 'vocab')
    assert kernel.sharding.shard_shape(kernel.shape) == (32 // 8, 61)
    rng = np.random.default_rng(0)
    table_DV, factors_DV = rng.normal(size=(2, 32, 61)).astype(np.float32)
    table_DV = jax.device_put(table_DV, kernel.sharding)

    @jax.jit
    @jax.value_and_grad
    def total(table_DV):
        padded = layout.pad_vocabulary(table_DV, axes)
        return (padded[:, :61] * factors_DV).sum() + (1 + jnp.square(padded[:, 61:])).sum()

    value, gradient = total(table_DV)
    padded = jax.jit(lambda table_DV: layout.pad_vocabulary(table_DV, axes))(table_DV)
    assert padded.shape == (32, 256)
    assert {shard.data.shape[1] for shard in padded.addressable_shards} == {128}
    np.testing.assert_array_equal(padded, np.pad(table_DV, [(0, 0), (0, 256 - 61)]))
    assert value == pytest.approx(float((table_DV * factors_DV).sum()) + 32 * (256 - 61), rel=1e-5)
    np.testing.assert_array_equal(gradient, factors_DV)
    assert {shard.data.shape for shard in gradient.addressable_shards} == {(32 // gradient_parts, 61)}
    # A table that is padded or divisible is returned unchanged.
    assert layout.pad_vocabulary(padded, axes) is padded


def test_indivisible_width_is_replicated_on_vocabulary_devices():
    config, layout = split_by(3, mesh__data=1, mesh__tensor=2, model__vocab_size=61, model__dim=36, model__head_dim=8)
    kernel = abstract_state(config, layout).params['head']['kernel']
    assert kernel.sharding.shard_shape(kernel.shape) == (36 // 4, 61)


@pytest.mark.parametrize(
    ('sizes', 'rows'),
    [
        # Each process has its share of the 32 rows.
        ({'replica': 2, 'data': 2, 'fsdp': 8}, [(0, 8), (8, 16), (16, 24), (24, 32)]),
        # Stages and sequence shards work on the same rows.
        ({'stage': 2, 'data': 2, 'fsdp': 4, 'context': 2}, [(0, 16), (16, 32), (0, 16), (16, 32)]),
        ({'stage': 4, 'context': 8}, [(0, 32)] * 4),
        ({'context': 16, 'fsdp': 2}, [(0, 16), (0, 16), (16, 32), (16, 32)]),
    ],
)
def test_rows_of_a_process(sizes, rows):
    for process, (start, stop) in enumerate(rows):
        layout = make_layout(resolved(**sizes), gpu_nodes(4, here=process))
        assert layout.local_rows(32) == slice(start, stop)


def test_batch_with_stages_and_sequence_shards():
    config, layout = split_by(
        3, mesh__fsdp=2, mesh__data=1, mesh__stage=2, mesh__context=2, train__per_device_batch_size=1
    )
    host_batch = {**small_batch(config), 'sources': np.arange(8, dtype=np.int32)}
    assert layout.local_rows(8) == slice(0, 8)
    batch = layout.put_batch(host_batch, 8)
    assert batch['tokens'].sharding == layout.batch
    for name, rows in host_batch.items():
        assert batch[name].shape == rows.shape
        np.testing.assert_array_equal(batch[name], rows)
        for shard in batch[name].addressable_shards:
            assert shard.data.shape == ((4, 8) if rows.ndim == 2 else (4,))
            np.testing.assert_array_equal(shard.data, rows[shard.index])
    # Both stages have each shard, and different shards have different tokens.
    firsts = {tuple(np.asarray(shard.data)[0]) for shard in batch['tokens'].addressable_shards}
    assert len(batch['tokens'].addressable_shards) == 8
    assert len(firsts) == 4
