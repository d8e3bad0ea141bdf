"""Tests the time of communication that computation hides, in small programs and in steps compiled for TPUs.

The nightly test compiles two programs for TPU v5p, which takes up to a minute of CPU time for each.
"""

import dataclasses
import functools

import pytest

from benchmarks.overlap import read_overlap
from maxlm.hardware.chips import find_chip
from maxlm.planning.estimate.roofline import efficiency_of, transfer_time
from maxlm.planning.estimate.transfers import Transfer
from maxlm.planning.targets import parse_target, target_layout
from maxlm.training.compile import WHOLE_PRODUCTS, compile_train_step
from maxlm.training.state import abstract_state
from tests.conftest import ROOT
from tests.small import small_config

CHIP = find_chip('TPU v4')
MESH = {'data': 1, 'fsdp': 4}
V5E_MESH = {'replica': 1, 'stage': 1, 'data': 1, 'fsdp': 16, 'context': 1, 'tensor': 1}
SIZE = 1024
# Times of a matrix gathered by four devices, and of its product with itself.
GATHER = transfer_time(
    Transfer('all-gather', ('fsdp',), 4, 2.0 * SIZE**2), CHIP, efficiency_of(CHIP), dict.fromkeys(MESH, 1), 4
)
PRODUCT = 2 * SIZE**3 / (CHIP.tflops * 1e12)
MATRIX = f'bf16[{SIZE},{SIZE}]{{1,0}}'
PART = f'bf16[{SIZE // 4},{SIZE}]{{1,0}}'
START = f'({PART}, {MATRIX}) all-gather-start(%w), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}'
# The result stays on the chip, so that writing it takes no time.
DOT = f'{MATRIX.replace("1,0}", "1,0:S(1)}")} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}'


def program(*lines, others=''):
    """Returns a scheduled program with these instructions after its parameters."""
    parameters = [f'%x = {MATRIX} parameter(0)', f'%w = {PART} parameter(1)']
    entry = '\n'.join(f'  {line}' for line in [*parameters, *lines])
    return f'HloModule m, is_scheduled=true, num_partitions=4\n\n{others}\nENTRY %main {{\n{entry}\n}}\n'


def overlap(text):
    return read_overlap(text, MESH, CHIP, num_devices=4)


def done(name, start):
    return f'%{name} = {MATRIX} all-gather-done(%{start})'


def dots(number):
    return [f'%dot{index} = {DOT}' for index in range(number)]


def test_computation_before_the_wait_hides_a_gather():
    enough = int(GATHER / PRODUCT) + 1
    assert enough > 2
    for number in (0, 1, 2, enough):
        found = overlap(program(f'%start = {START}', *dots(number), done('gathered', 'start')))
        assert found['total'] == found['all-gather']
        assert found['all-gather'].seconds == pytest.approx(GATHER)
        assert found['all-gather'].hidden == pytest.approx(min(GATHER, number * PRODUCT))
        assert (found['all-gather'].count, found['all-gather'].count_async) == (1, 1)
    # Control: the same matmuls before or after the gather.
    for lines in (
        [*dots(enough), f'%start = {START}', done('gathered', 'start')],
        [f'%start = {START}', done('gathered', 'start'), *dots(enough)],
    ):
        assert overlap(program(*lines))['total'].share == 0


def test_synchronous_gather_is_not_hidden():
    text = f'%gathered = {MATRIX} all-gather(%w), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}'
    found = overlap(program(*dots(1), text))['all-gather']
    assert (found.share, found.count, found.count_async) == (0, 1, 0)


def test_transfers_on_a_link_are_sequential():
    starts = [f'%a = {START}', f'%b = {START}']
    found = overlap(program(*starts, *dots(1), done('gathered_a', 'a'), done('gathered_b', 'b')))['total']
    assert found.seconds == pytest.approx(2 * GATHER)
    assert found.hidden == pytest.approx(PRODUCT)
    # If the second gather is awaited first, that wait includes the first gather.
    assert overlap(program(*starts, *dots(1), done('gathered_b', 'b'), done('gathered_a', 'a')))['total'].hidden == (
        pytest.approx(PRODUCT)
    )


def test_loop_bodies_count_once_per_iteration():
    loop = (
        f'%condition {{\n  %p.1 = (s32[], {MATRIX}, {PART}) parameter(0)\n  %i.1 = s32[] get-tuple-element(%p.1), '
        'index=0\n  %n = s32[] constant(7)\n  ROOT %less = pred[] compare(%i.1, %n), direction=LT\n}\n\n'
        f'%body {{\n  %p = (s32[], {MATRIX}, {PART}) parameter(0)\n  %i = s32[] get-tuple-element(%p), index=0\n'
        f'  %x = {MATRIX} get-tuple-element(%p), index=1\n  %w = {PART} get-tuple-element(%p), index=2\n'
        f'  %start = {START}\n  %dot = {DOT}\n  {done("gathered", "start")}\n  %one = s32[] constant(1)\n'
        f'  %next = s32[] add(%i, %one)\n  ROOT %out = (s32[], {MATRIX}, {PART}) tuple(%next, %gathered, %w)\n}}\n'
    )
    tuple_type = f'(s32[], {MATRIX}, {PART})'
    lines = [
        '%zero = s32[] constant(0)',
        f'%all = {tuple_type} tuple(%zero, %x, %w)',
        f'ROOT %loop = {tuple_type} while(%all), condition=%condition, body=%body',
    ]
    found = overlap(program(*lines, others=loop))['all-gather']
    assert found.seconds == pytest.approx(7 * GATHER)
    assert found.hidden == pytest.approx(7 * PRODUCT)
    # Control: another trip count.
    fewer = overlap(program(*lines, others=loop.replace('constant(7)', 'constant(5)')))
    assert fewer['all-gather'].count == 5


def test_fusions_that_continue_a_gather_hide_it():
    """Uses a step for v5e, where two gathers of a layer continue within fusions of matmuls."""
    text = (ROOT / 'tests/planning/compiled/programs' / 'v5e_layers.txt').read_text()
    read = functools.partial(read_overlap, mesh_sizes=V5E_MESH, chip=find_chip('TPU v5 lite'), num_devices=16)
    found = read(text)['all-gather']
    assert 0 < found.count_async < found.count
    assert 0 < found.hidden < found.seconds
    # Control: without chain ids, each part is a gather that the device waits for.
    assert read(text.replace('chain_id=', 'id='))['all-gather'].hidden == 0


def test_windowed_matmuls_hide_collective_permutes():
    """Uses the gradient of a matrix in a step for v5e, whose shards are summed while they rotate in a ring."""
    text = (ROOT / 'tests/planning/compiled/programs' / 'v5e_windowed_product.txt').read_text()
    read = functools.partial(read_overlap, mesh_sizes=V5E_MESH, chip=find_chip('TPU v5 lite'), num_devices=16)
    found = read(text)['collective-permute']
    assert found.count_async == found.count == 2 * 4 * 4 * 4
    assert 0.05 * found.seconds < found.hidden < found.seconds
    # Control: a device without computation hides nothing.
    assert read(text.replace(' convolution(', ' add('))['collective-permute'].hidden < 1e-3 * found.hidden


def test_unscheduled_program_is_an_error():
    with pytest.raises(ValueError, match='not scheduled'):
        overlap(program(f'%start = {START}', done('gathered', 'start')).replace('is_scheduled=true, ', ''))


def compiled(options):
    """Returns the overlap in the step of a small Llama on 8 v5p chips, with scanned layers and 8192 tokens on each."""
    target = parse_target('v5p:2x2x2')
    config = small_config(
        num_devices=target.num_devices,
        model__family='llama',
        model__num_layers=4,
        model__dim=1024,
        model__num_heads=8,
        model__vocab_size=1024,
        model__dtype='bfloat16',
        model__remat_policy='full',
        data__seq_len=1024,
        data__document_mask=False,
        train__global_batch_size=8 * target.num_devices,
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='splash'))
    layout = target_layout(target, config.mesh)
    step = compile_train_step(config, layout, abstract_state(config, layout), options=options).step
    return read_overlap(step.as_text(), config.mesh.sizes, target.chip, num_devices=target.num_devices)


# Slow: compiles two programs, each with up to a minute of CPU time.
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_windowed_matmuls_hide_gradient_reductions():
    ours, undivided = compiled({}), compiled(WHOLE_PRODUCTS)
    # The compiled program has 0.92 and 0.46; the device waits for gathers.
    assert ours['collective-permute'].share > 0.8
    assert ours['total'].share > 0.4
    # Control: with undivided matmuls, the device waits for the sums.
    assert 'collective-permute' not in undivided
    assert undivided['total'].share < 0.1
    assert undivided['all-reduce'].seconds > 2 * ours['all-reduce'].seconds
