"""Tests the transfers and operations read from compiled programs: full CPU programs, and excerpts for GPUs and TPUs.

Shapes: L layers, B batch, D width, F feed-forward.
"""

import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlm.planning.compiled.program import read_program
from maxlm.planning.estimate.work import estimate_work
from maxlm.planning.forecast import compiled_work
from maxlm.training.compile import compile_train_step
from maxlm.training.flops import training_flops
from maxlm.training.state import abstract_state
from tests.small import small_config, small_layout

PROGRAMS = Path(__file__).parent / 'programs'
AXES = ('a', 'b', 'c')
# Two micro-batches.
SMALL = {'train__global_batch_size': 16, 'train__per_device_batch_size': 1}


def fsdp(size):
    return {'replica': 1, 'stage': 1, 'data': 1, 'fsdp': size, 'context': 1, 'tensor': 1}


def sent(program, kind):
    """Returns the bytes of the arrays in all transfers of a kind."""
    return sum(transfer.count * transfer.size for transfer in program.transfers if transfer.kind == kind)


def axes_of(program, kind):
    return {transfer.axes for transfer in program.transfers if transfer.kind == kind}


def cube():
    """Returns a mesh of 2 · 2 · 2 devices whose ids differ from their positions."""
    return Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


def compiled_text(function, *shapes_and_specs):
    mesh = cube()
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes_and_specs
    ]
    return jax.jit(function).lower(*arguments).compile().as_text()


@functools.cache
def layers_text():
    """Returns the program of five layers whose weights are gathered along `b` in the loop."""
    L, B, D, F = 5, 16, 24, 40

    def layers(x_BD, w_LDF, v_LFD):
        def layer(x_BD, weights):
            w_DF, v_FD = (jax.lax.with_sharding_constraint(w, NamedSharding(cube(), P())) for w in weights)
            return jnp.tanh(x_BD @ w_DF) @ v_FD, None

        return jax.lax.scan(layer, x_BD, (w_LDF, v_LFD))[0]

    return compiled_text(layers, ((B, D), P('a')), ((L, D, F), P(None, 'b')), ((L, F, D), P(None, 'b')))


def test_a_loop_of_gathered_products():
    L, B, D, F = 5, 16, 24, 40
    program = read_program(layers_text(), cube().shape)
    assert program.flops == L * 2 * 2 * (B // 2) * D * F
    assert sent(program, 'all-gather') == L * 2 * D * F * 4
    assert {(transfer.kind, transfer.axes, transfer.group) for transfer in program.transfers} == {
        ('all-gather', ('b',), 2)
    }
    assert not program.unknown_loops
    # A ring sends all but a device's own shard.
    assert sum(transfer.sent for transfer in program.transfers) == L * 2 * D * F * 4 / 2


def test_rounds_of_a_loop():
    text = layers_text()
    expected = read_program(text, cube().shape)
    unknown = re.sub(r'"known_trip_count":\{"n":"5"\},?', '', text)
    assert unknown != text
    deduced = read_program(unknown, cube().shape)
    assert (deduced.flops, deduced.transfers) == (expected.flops, expected.transfers)
    # Controls: the noted trip count matters, and so does the loop bound.
    more = read_program(text.replace('"n":"5"', '"n":"7"'), cube().shape)
    assert more.flops == expected.flops * 7 / 5
    assert sent(more, 'all-gather') == sent(expected, 'all-gather') * 7 / 5
    assert 'constant(5)' in unknown
    longer = read_program(unknown.replace('constant(5)', 'constant(9)'), cube().shape)
    assert longer.flops == expected.flops * 9 / 5


def test_a_loop_of_unknown_length_is_reported():
    def until_small(x_BD, w_DD):
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x @ w_DD, x_BD)

    text = compiled_text(until_small, ((16, 24), P()), ((24, 24), P()))
    program = read_program(text, cube().shape)
    assert len(program.unknown_loops) == 1
    assert program.flops == 2 * 16 * 24 * 24
    # Control: a loop without matmuls is not reported.
    text = compiled_text(lambda x: jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x), ((16, 24), P()))
    assert not read_program(text, cube().shape).unknown_loops


def test_every_subset_of_axes():
    subsets = [axes for size in (1, 2, 3) for axes in itertools.combinations(AXES, size)]
    # Each subset of axes has its own size.
    sizes = {axes: 3 + number for number, axes in enumerate(subsets)}

    @functools.partial(jax.shard_map, mesh=cube(), in_specs=P(AXES), out_specs=P(AXES))
    def send(x):
        for axes in subsets:
            piece = x[: sizes[axes]]
            x = x.at[: sizes[axes]].add(jax.lax.psum(piece, axes) * jax.lax.all_gather(piece, axes).sum(0))
        return x

    program = read_program(compiled_text(send, ((8 * 16,), P(AXES))), cube().shape)
    found = {(transfer.kind, transfer.axes, transfer.size) for transfer in program.transfers}
    assert found == {('all-reduce', axes, 4 * sizes[axes]) for axes in subsets} | {
        ('all-gather', axes, 4 * sizes[axes] * 2 ** len(axes)) for axes in subsets
    }
    assert all(transfer.group == 2 ** len(transfer.axes) for transfer in program.transfers)


@pytest.mark.parametrize('axis', AXES)
def test_other_collectives(axis):
    @functools.partial(jax.shard_map, mesh=cube(), in_specs=P(AXES), out_specs=P(AXES))
    def send(x_LF):
        x_LF = jax.lax.ppermute(x_LF, axis, [(0, 1), (1, 0)])
        x_LF = jnp.tanh(jax.lax.all_to_all(x_LF, axis, 1, 1, tiled=True))
        return jax.lax.psum_scatter(x_LF, axis, scatter_dimension=1, tiled=True)

    program = read_program(compiled_text(send, ((8 * 3, 10), P(AXES))), cube().shape)
    assert {(transfer.kind, transfer.axes, transfer.group, transfer.size) for transfer in program.transfers} == {
        ('collective-permute', (axis,), 2, 4 * 3 * 10),
        ('all-to-all', (axis,), 2, 4 * 3 * 10),
        ('reduce-scatter', (axis,), 2, 4 * 3 * 10),
    }


def test_the_branch_with_the_most_work_counts():
    def choose(x_BD, w_DD):
        return jax.lax.cond(x_BD[0, 0] > 0, lambda x: x @ w_DD @ w_DD, lambda x: x @ w_DD, x_BD)

    program = read_program(compiled_text(choose, ((16, 24), P()), ((24, 24), P())), cube().shape)
    assert program.flops == 2 * 2 * 16 * 24 * 24


@functools.cache
def compiled_step(num_devices, **overrides):
    config = small_config(num_devices=num_devices, **overrides)
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    return config, abstract, compile_train_step(config, layout, abstract).step


def sizes_of(abstract):
    """Returns the number of elements in the kernels of blocks, in the embeddings, and in all parameters."""
    leaves = jax.tree_util.tree_flatten_with_path(abstract.params)[0]
    named = {'.'.join(entry.key for entry in path): leaf.size for path, leaf in leaves}
    blocks = sum(size for name, size in named.items() if name.endswith('.kernel'))
    return blocks, sum(size for name, size in named.items() if name.endswith('embedding')), sum(named.values())


def test_zero_3_gathers_for_each_micro_batch_forward_and_backward():
    config, abstract, step = compiled_step(8, **SMALL, model__dtype='bfloat16', model__remat_policy='full')
    program = read_program(step.as_text(), config.mesh.sizes)
    blocks, tables, _ = sizes_of(abstract)
    # The CPU backend does not send bfloat16. The embeddings are outside the loop over layers, so they are gathered once
    # for all micro-batches. The token embedding is also the head, which is gathered for each.
    head = config.model.vocab_size * config.model.dim
    assert sent(program, 'all-gather') == 4 * (config.accumulation * 2 * blocks + tables + head)
    assert axes_of(program, 'all-gather') == axes_of(program, 'all-reduce') == {('fsdp',)}
    # Control: the gradient of a layer is summed once.
    summed = {transfer.size: transfer.count for transfer in program.transfers if transfer.kind == 'all-reduce'}
    assert config.model.num_layers * config.accumulation in summed.values()


def test_axes_of_a_mixed_layout():
    mesh = {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'model__vocab_size': 64}
    config, abstract, step = compiled_step(8, **SMALL, **mesh, model__dtype='bfloat16', model__remat_policy='full')
    program = read_program(step.as_text(), config.mesh.sizes)
    assert axes_of(program, 'all-gather') == {('fsdp',)}
    blocks, tables, _ = sizes_of(abstract)
    # A device gathers its half of the heads and of the feed-forward layer.
    assert sent(program, 'all-gather') >= 4 * config.accumulation * 2 * blocks / 2
    assert sent(program, 'all-gather') <= 4 * config.accumulation * (2 * blocks / 2 + 2 * tables)
    reduced = axes_of(program, 'all-reduce')
    assert {('tensor',), ('data',)} <= reduced
    assert () not in reduced
    # Control: the program is read with another mesh.
    other = read_program(step.as_text(), {'data': 4, 'tensor': 2})
    assert axes_of(other, 'all-gather') == {()}
    with pytest.raises(ValueError, match='the program is for 8 devices'):
        read_program(step.as_text(), {'data': 4})


def test_operations_of_the_model():
    width = {'model__dim': 128, 'model__num_heads': 2, 'data__seq_len': 64, 'model__vocab_size': 256}
    programs, counted_flops = {}, {}
    for scan_layers in (False, True):
        config, _, step = compiled_step(1, **width, model__scan_layers=scan_layers)
        programs[scan_layers] = read_program(step.as_text(), config.mesh.sizes)
        counted_flops[scan_layers] = step.cost_analysis()['flops']
    tokens = config.train.global_batch_size * config.data.seq_len
    expected = tokens * training_flops(config.model, config.data.seq_len).full
    assert programs[False].flops == pytest.approx(expected, rel=0.001)
    # The backward pass recomputes scores. With unrolled layers, XLA merges them with the scores of the forward pass.
    scores = tokens * config.model.num_layers * 2 * config.data.seq_len * config.model.dim
    assert programs[True].flops == pytest.approx(expected + scores, rel=0.001)
    # XLA also counts elementwise work (norms, softmax, gelu, AdamW), here 3 %, but counts the body of a loop once.
    assert counted_flops[False] == pytest.approx(expected, rel=0.05)
    assert counted_flops[True] < 0.7 * expected
    assert not programs[True].transfers


def gpt2_layer(dim, ffn_dim):
    """Returns the number of elements in the kernels of a layer."""
    return 4 * dim**2 + 2 * dim * ffn_dim


def excerpt(name):
    return (PROGRAMS / f'{name}.txt').read_text()


def test_layers_on_gpus():
    """Reads 24 layers forward, with 16 micro-batches of 4 · 2048 tokens, Triton matmuls and cuDNN attention."""
    text = excerpt('h100_layers')
    program = read_program(text, fsdp(8))
    assert program.flops == 16 * 24 * 2 * gpt2_layer(1536, 6144) * 4 * 2048
    assert program.kernels == {'__cudnn$fmhaScaleBiasSoftmax': 16 * 24}
    assert sent(program, 'all-gather') == 16 * 24 * 2 * gpt2_layer(1536, 6144)
    # The attention kernels are gathered together and block. One of the two other kernels is gathered during attention.
    assert sorted((transfer.size, transfer.is_async) for transfer in program.transfers) == [
        (2 * 4 * 1536**2, False),
        (2 * 1536 * 6144, False),
        (2 * 1536 * 6144, True),
    ]
    # Without XLA's notes, trip counts are deduced from the loops.
    without = re.sub(r', backend_config=\{"known_trip_count".*', '', text)
    assert without != text
    assert read_program(without, fsdp(8)) == program
    # Control: a transfer that is awaited at once is not asynchronous.
    done = re.search(r'\n  %all-gather-done = .*', text).group()
    at_once = re.sub(r'\n  %all-gather-start = .*', lambda start: start.group() + done, text.replace(done, ''))
    assert not any(transfer.is_async for transfer in read_program(at_once, fsdp(8)).transfers)


def test_products_of_cublas():
    program = read_program(excerpt('h100_cublas'), {'data': 8})
    # [64, 256] · [256, 1024] and [64, 32] · [64, 32]ᵀ.
    assert program.flops == 2 * (64 * 256 * 1024 + 64 * 32 * 64)
    assert not program.kernels


@pytest.mark.parametrize('name', ['v4_layers', 'v5e_layers'])
def test_layers_on_tpus(name):
    """Reads 4 layers forward, 2 micro-batches of 2 · 512 tokens. Matmuls are convolutions, and loops carry no notes."""
    text = excerpt(name)
    assert 'known_trip_count' not in text
    assert ' dot(' not in text
    program = read_program(text, fsdp(16))
    assert program.flops == 2 * 4 * 2 * gpt2_layer(512, 2048) * 2 * 512
    # On v5e, fusions that continue a gather while they compute repeat its name.
    assert sent(program, 'all-gather') == 2 * 4 * 2 * gpt2_layer(512, 2048)
    assert sum(transfer.count for transfer in program.transfers) == 2 * 4 * 6
    assert {transfer.is_async for transfer in program.transfers} == {True, False}
    assert not program.unknown_loops
    # Control: one layer fewer.
    assert 'constant(4)' in text
    assert read_program(text.replace('constant(4)', 'constant(3)'), fsdp(16)).flops == program.flops * 3 / 4
    assert read_program(text, {'data': 4, 'fsdp': 4}).transfers[0].axes == ('data', 'fsdp')


def test_a_product_in_steps_on_a_tpu():
    """Reads the gradient of one matrix, which is computed twice in each of 4 layers.

    Its shards are summed while they rotate in a ring.
    """
    text = excerpt('v5e_windowed_product')
    program = read_program(text, fsdp(16))
    assert program.flops == 2 * 4 * 2 * 512 * 2048 * 2 * 512
    # Shards move in both directions at once, with four sends in each of 4 rounds.
    assert sum(transfer.count for transfer in program.transfers) == 2 * 4 * 4 * 4
    assert {(transfer.kind, transfer.axes, transfer.size) for transfer in program.transfers} == {
        ('collective-permute', ('fsdp',), 2 * 512 * 2048 / 16)
    }
    assert all(transfer.is_async for transfer in program.transfers)
    # Control: one round fewer; the counter increases by 2.
    assert read_program(text.replace('constant(8)', 'constant(6)'), fsdp(16)).flops == program.flops * 3 / 4


def test_not_a_program():
    with pytest.raises(ValueError, match='no ENTRY computation'):
        read_program('HloModule nothing\n', {'data': 1})
    with pytest.raises(ValueError, match='cannot parse a line'):
        read_program('HloModule x\n\nENTRY %main {\n  what is this\n}\n', {'data': 1})


def test_unknown_work_of_experts_is_that_of_the_formula():
    experts = {'model__num_experts': 4, 'model__num_experts_per_token': 2}
    config = small_config(num_devices=2, mesh__expert=2, mesh__fsdp=1, **experts)
    formula = estimate_work(config)
    text = 'HloModule m, num_partitions=2\n\nENTRY main {\n  x = f32[4]{0} parameter(0)\n  ROOT y = f32[4]{0} '
    ragged, plain = (
        read_program(f'{text}{operation}(x), replica_groups={{{{0,1}}}}\n}}\n', config.mesh.sizes)
        for operation in ('ragged-all-to-all', 'all-to-all')
    )
    work = compiled_work(config, formula, ragged)
    assert work.flops == formula.flops
    assert work.transfers == [each for each in formula.transfers if each.kind == 'all-to-all'] != []
    # Control: the transfers of other exchanges are in the program.
    assert compiled_work(config, formula, plain).transfers == plain.transfers != work.transfers
