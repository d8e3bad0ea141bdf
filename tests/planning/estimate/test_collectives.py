"""Tests the estimated collectives of a layout against XLA's programs of the step for eight H100.

The recorded bytes come from programs that were compiled ahead of time (jax 0.12, CUDA 12). They count, for each kind
of collective, the complete arrays of a group, each as often as a step sends it.
"""

import collections
import dataclasses

import pytest

from maxlm.config.loading import build, default, load
from maxlm.config.resolve import resolve
from maxlm.planning.estimate.collectives import estimate_transfers
from tests.conftest import ROOT
from tests.small import STREAM, small_config

LOOP = ('model.scan_layers=true', 'mesh.zero_stage=3')
SMALL = (*LOOP, 'train.per_device_batch_size=4')
SAVING = (*LOOP, 'model.remat_policy=dots_no_batch')
# Config, overrides → GB by kind.
COMPILED = {
    # Below ZeRO-3, the parameters are gathered once per step, those of the blocks in bfloat16. ZeRO-1 also reduces the
    # gradients once per step.
    ('1b.py', ()): {'all-gather': 1.68, 'reduce-scatter': 3.04},
    ('1b.py', ('mesh.zero_stage=2',)): {'all-gather': 1.68, 'reduce-scatter': 14.6},
    ('1b.py', SMALL): {'all-gather': 26.8, 'reduce-scatter': 29.2},
    ('1b.py', (*SMALL, 'model.remat_policy=full')): {'all-gather': 48.5, 'reduce-scatter': 29.2},
    ('1b.py', (*LOOP, 'train.per_device_batch_size=16', 'model.remat_policy=full')): {
        'all-gather': 12.1,
        'reduce-scatter': 7.3,
    },
    ('1b.py', ('mesh.data=8', 'mesh.fsdp=1')): {'all-reduce': 3.04},
    ('1b.py', (*SMALL, 'mesh.data=8', 'mesh.fsdp=1')): {'all-reduce': 29.1},
    ('1b.py', (*SMALL, 'mesh.context=2', 'mesh.fsdp=4')): {
        'all-gather': 53.5,
        'collective-permute': 116.0,
        'reduce-scatter': 58.4,
    },
    # The mesh does not divide this vocabulary.
    ('1b.py', (*SMALL, 'mesh.tensor=2', 'mesh.fsdp=4', 'model.vocab_size=50257')): {
        'all-gather': 26.9,
        'all-reduce': 79.0,
        'all-to-all': 3.1,
        'reduce-scatter': 29.4,
    },
    ('code.py:7b-32gb', ()): {'all-gather': 3382.9, 'reduce-scatter': 1758.6},
    ('code.py:7b-32gb', ('mesh.tensor=2', 'mesh.fsdp=4')): {
        'all-gather': 3382.9,
        'all-reduce': 1391.9,
        'reduce-scatter': 1758.6,
    },
    ('depth.py:24-2025', (*SAVING, 'train.per_device_batch_size=4')): {
        'all-gather': 21.7,
        'all-to-all': 0.3,
        'reduce-scatter': 10.9,
    },
    ('mix.py:tiny', LOOP): {'all-gather': 0.3, 'reduce-scatter': 0.4},
    ('mix.py:xlarge', (*SAVING, 'train.per_device_batch_size=8')): {'all-gather': 5.8, 'reduce-scatter': 3.7},
    ('neox.py:tuned', SAVING): {'all-gather': 83.9, 'reduce-scatter': 48.5},
}


def sent_by_kind(spec, overrides):
    config = load(str(ROOT / 'configs' / spec), overrides)
    vocab_size = config.model.vocab_size or (32 if 'depth' in spec else 50_257)
    config = resolve(config, platform='gpu', num_devices=8, vocab_size=vocab_size, windows=10**7)
    total = collections.Counter()
    for transfer in estimate_transfers(config):
        total[transfer.kind] += transfer.size * transfer.count / 1e9
    return {kind: size for kind, size in total.items() if size > 0.1}


@pytest.mark.parametrize(('spec', 'overrides'), COMPILED)
def test_bytes_are_those_of_the_compiled_program(spec, overrides):
    assert sent_by_kind(spec, overrides) == pytest.approx(COMPILED[spec, overrides], rel=0.01, abs=0.06)


SMALL_LLAMA = {
    **{'model.family': 'llama', 'model.vocab_size': 8192, 'model.num_layers': 4, 'model.dim': 512},
    **{'model.num_heads': 4, 'model.attention': 'cudnn', 'model.remat_policy': 'full', 'mesh.zero_stage': 3},
    **{'data.seq_len': 1024, 'data.document_mask': False, 'train.num_steps': 10},
    **{'train.global_batch_size': 32, 'train.per_device_batch_size': 2},
}
LARGE = {'model.num_layers': 3, 'model.dim': 1024, 'model.num_heads': 8}
MODULES, TENSOR = {'model.mtp_depth': 2}, {'mesh.tensor': 2, 'mesh.fsdp': 4}
# Programs of a small Llama with modules of multi-token prediction or a teacher for eight H100 → MB by kind.
SMALL_PROGRAMS = {
    'modules': (MODULES, {'all-gather': 251.1, 'reduce-scatter': 215.5}),
    'modules, all saved': (
        {**MODULES, 'model.remat_policy': 'none'},
        {'all-gather': 148.4, 'reduce-scatter': 215.5},
    ),
    'modules, tensor': (
        {**MODULES, **TENSOR},
        {'all-gather': 263.7, 'all-reduce': 319.1, 'reduce-scatter': 219.7},
    ),
    'modules, ZeRO-1': ({**MODULES, 'mesh.zero_stage': 1}, {'all-gather': 89.1, 'reduce-scatter': 114.8}),
    'teacher': ({}, {'all-gather': 374.3, 'reduce-scatter': 101.7}),
    'teacher, tensor': (TENSOR, {'all-gather': 374.3, 'all-reduce': 302.3, 'reduce-scatter': 101.7}),
    'teacher, ZeRO-1': ({'mesh.zero_stage': 1}, {'all-gather': 169.9, 'reduce-scatter': 84.9}),
}


def small_llama(overrides, teacher=None):
    values = default()
    for key, value in {**SMALL_LLAMA, **overrides}.items():
        section, name = key.split('.')
        values[section][name] = value
    if teacher is not None:
        values.distill.teacher = 'runs/teacher'
    config = dataclasses.replace(build(values), teacher=teacher)
    return resolve(config, platform='gpu', num_devices=8, vocab_size=8192, windows=10**6, capability=(9, 0))


def program_config(name):
    """Returns the config of a program of SMALL_PROGRAMS."""
    teacher = small_llama(LARGE).model if name.startswith('teacher') else None
    return small_llama(SMALL_PROGRAMS[name][0], teacher)


def megabytes_by_kind(config):
    total = collections.Counter()
    for transfer in estimate_transfers(config):
        total[transfer.kind] += transfer.size * transfer.count / 1e6
    return {kind: size for kind, size in total.items() if size > 0.1}


@pytest.mark.parametrize('name', SMALL_PROGRAMS)
def test_modules_and_teachers_send_the_bytes_of_the_compiled_program(name):
    config, (_, sent) = program_config(name), SMALL_PROGRAMS[name]
    # The compiler gathers the head once more than estimated in some programs.
    assert megabytes_by_kind(config) == pytest.approx(sent, rel=0.05)
    # Control: without modules and teacher, the program sends less.
    plain = dataclasses.replace(config, teacher=None, model=dataclasses.replace(config.model, mtp_depth=0))
    assert megabytes_by_kind(plain)['all-gather'] < 0.7 * sent['all-gather']


def test_the_layouts_differ():
    """Control: no two recorded layouts of one model are within the tolerance of each other."""
    layouts = [sent for (spec, _), sent in COMPILED.items() if spec == '1b.py']
    for number, layout in enumerate(layouts):
        assert all(layout != pytest.approx(other, rel=0.01, abs=0.06) for other in layouts[:number])


def test_axes_and_groups():
    config = small_config(num_devices=8, mesh__replica=2, mesh__fsdp=2, mesh__tensor=2, model__vocab_size=64)
    transfers = estimate_transfers(config)
    assert {transfer.axes: transfer.group for transfer in transfers} == {
        ('fsdp',): 2,
        ('replica',): 2,
        ('tensor',): 2,
        ('replica', 'fsdp', 'tensor'): 8,
    }
    assert all(transfer.is_async == (transfer.axes in (('fsdp',), ('replica',))) for transfer in transfers)


def test_kernels_are_sent_in_8_bits_and_their_gradients_are_not():
    sizes = {'num_devices': 8, 'model__dim': 64, 'model__dtype': 'bfloat16', 'model__remat_policy': 'full'}
    in_16_bits, in_8_bits = (
        estimate_transfers(small_config(model__matmul_precision=matmul, **sizes)) for matmul in ('default', 'fp8')
    )
    gathers, of_codes = ([t for t in all if t.kind == 'all-gather'] for all in (in_16_bits, in_8_bits))
    assert [t.size for t in of_codes] == [gathers[0].size / 2, gathers[1].size]
    scatters, others = ([t for t in all if t.kind == 'reduce-scatter'] for all in (in_16_bits, in_8_bits))
    assert scatters == others
    # A scale is one number, and all devices wait for it.
    (scales,) = set(in_8_bits) - set(in_16_bits) - set(of_codes)
    assert (scales.size, scales.group, scales.is_async) == (4, 8, False)


def test_one_device_sends_nothing():
    assert estimate_transfers(small_config()) == []


def sent(config):
    total = collections.Counter()
    for transfer in estimate_transfers(config):
        total[transfer.kind] += transfer.size * transfer.count
    return total


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_tables_of_value_embeddings_are_gathered_in_each_pass_and_their_gradients_are_summed(remat):
    settings = {'num_devices': 2, 'mesh__fsdp': 2, 'mesh__zero_stage': 3, 'model__remat_policy': remat}
    plain, changed = (
        small_config(**settings, model__value_embedding_pattern=pattern, train__per_device_batch_size=1)
        for pattern in ('', 'NV')
    )
    # One table of 61 ids and 32 dims, in each of 4 micro-batches.
    table = 4 * 4 * 61 * 32
    more = sent(changed) - sent(plain)
    assert more == {'all-gather': (2 if remat == 'full' else 1) * table, 'reduce-scatter': table}


def test_rows_of_value_embeddings_are_summed_over_tensor_shards():
    settings = {'num_devices': 2, 'mesh__tensor': 2, 'mesh__fsdp': 1, 'model__vocab_size': 64}
    plain, changed = (small_config(**settings, model__value_embedding_pattern=pattern) for pattern in ('', 'V'))
    # Two layers, forward and backward, 32 dims for each of 8 · 16 tokens.
    assert sent(changed) - sent(plain) == {'all-reduce': 2 * 2 * 4 * 32 * 8 * 16}


@pytest.mark.parametrize(('settings', 'states'), [({}, 1), ({'model__backout_layer': 0}, 2), (STREAM, 3)])
def test_a_pipeline_sends_the_stream(settings, states):
    config = small_config(num_devices=2, mesh__stage=2, mesh__fsdp=1, train__per_device_batch_size=2, **settings)
    stream = states * 2 * config.data.seq_len * config.model.dim * 4
    sizes = {(t.kind, t.count): t.size for t in estimate_transfers(config) if t.axes == ('stage',) and t.size > 4}
    # Each of 4 micro-batches and an idle round is sent forward and backward. Then all results are reduced.
    assert sizes == {('collective-permute', 10): stream, ('all-reduce', 2): 4 * stream}


EXPERTS = {'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 64}


@pytest.mark.parametrize('capacity', [0, 1.25])
def test_experts_exchange_rows(capacity):
    mesh = {'num_devices': 4, 'mesh__expert': 2, 'mesh__fsdp': 2}
    config = small_config(**mesh, **EXPERTS, model__expert_capacity_factor=capacity)
    model, N = config.model, config.train.per_device_batch_size * config.data.seq_len
    # A sequence of 16 tokens with 2 of 4 experts sends 8 rows to an expert, and up to 1.25 times as many. Without a
    # capacity, both rows of every token could be sent to each of 2 devices.
    rows = config.train.per_device_batch_size * 4 * 10 if capacity else 2 * N * 2
    runs = config.accumulation * model.num_layers
    exchanges = {t.size: t.count for t in estimate_transfers(config) if t.kind == 'all-to-all'}
    indices = {} if capacity else {4.0 * rows: runs}
    assert exchanges == {4 * rows * model.dim: 4 * runs, **indices}
    gathers = {(t.axes, t.size) for t in estimate_transfers(config) if t.kind == 'all-gather'}
    # A device gathers the kernels of its 2 experts, and the router's in float32 over all devices.
    assert (('fsdp',), 4 * 2 * 2 * model.dim * 64) in gathers
    assert (('fsdp', 'expert'), 4 * 4 * model.dim) in gathers
    # Control: without the axis, all experts are gathered and nothing is exchanged.
    alone = estimate_transfers(small_config(num_devices=4, **EXPERTS))
    assert {t.kind for t in alone if t.axes == ('expert',)} == set()
    assert (('fsdp',), 4 * 4 * 2 * model.dim * 64) in {(t.axes, t.size) for t in alone}
