"""Collectives and memory of layouts in programs compiled for sixteen TPU v4 chips.

The TPU compiler needs seconds of CPU time for each program. Two programs are compiled by default, three more nightly.
"""

import re
from collections import Counter

import jax
import pytest

from benchmarks.overlap import read_overlap
from maxlm.parallel.layout import make_layout
from maxlm.planning.compiled.program import read_program
from maxlm.planning.targets import parse_target
from maxlm.training.compile import DEVICE_OPTIONS, compile_train_step
from maxlm.training.objectives import BATCH_TYPES
from maxlm.training.state import abstract_state
from tests.small import small_config
from tests.topologies import tpu_devices

# On a busy machine a compilation takes a minute, and a test may need two programs.
pytestmark = pytest.mark.timeout(300)

CHIPS = 16
DIM, WINDOW, GLOBAL_BATCH = 512, 256, 32
MODEL = {
    'model__family': 'llama',
    'model__num_layers': 16,
    'model__dim': DIM,
    'model__num_heads': 4,
    'model__vocab_size': 1024,
    'model__dtype': 'bfloat16',
    'data__seq_len': WINDOW,
    'data__document_mask': False,
    'train__global_batch_size': GLOBAL_BATCH,
}
# Matrices of a Llama block: query, key, value, out, gate, up, down.
MATRICES = 7


class Program:
    """A step compiled for the TPU chips."""

    def __init__(self, **settings):
        config = small_config(num_devices=CHIPS, **{**MODEL, **settings})
        layout = make_layout(config.mesh, tpu_devices('v4:2x2x4'))
        self.state = abstract_state(config, layout)
        compiled = compile_train_step(config, layout, self.state)
        self.memory = compiled.memory_bytes()
        self.text, self.mesh_sizes = compiled.step.as_text(), config.mesh.sizes
        self.lines = re.findall(
            r'= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(',
            self.text,
        )

    def count(self, kind, shape=''):
        return sum(found == kind and shape in shapes for shapes, found in self.lines)


@pytest.fixture(scope='module')
def sharded():
    return Program(model__remat_policy='full')


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


BATCH = len(BATCH_TYPES) * 4 * GLOBAL_BATCH * WINDOW // CHIPS


def test_zero_3_gathers_each_matrix_when_it_is_used(sharded):
    # All-gathers of all matrices in the forward and backward loops over layers; embedding and head once.
    assert sharded.count('all-gather') == 2 * MATRICES + 2
    # No activations are communicated.
    assert Counter(kind for _, kind in sharded.lines).keys() == {'all-gather', 'all-reduce'}
    assert sharded.count('all-reduce', f'{WINDOW},{DIM}]') == 0


def gathers(program):
    chip = parse_target('v4:2x2x4').chip
    return read_overlap(program.text, program.mesh_sizes, chip, num_devices=CHIPS)['all-gather']


def test_gathers_are_asynchronous(sharded):
    found = gathers(sharded)
    assert found.count_async == found.count
    # With such small batches, computation hides little communication.
    assert found.share > 0.05


@pytest.mark.nightly
def test_gathers_block_without_the_device_options(monkeypatch):
    """Negative control of the previous test."""
    monkeypatch.delitem(DEVICE_OPTIONS, 'TPU v4')
    plain = gathers(Program(model__remat_policy='full'))
    assert (plain.count_async, plain.share) == (0, 0)


def test_zero_3_stores_no_complete_parameters(sharded):
    assert sharded.memory['state'] == pytest.approx(size(sharded.state) / CHIPS + BATCH, rel=0.02)
    # Temporary buffers are less than a quarter of the parameters in bfloat16.
    assert sharded.memory['temporary'] < 0.25 * size(sharded.state.params) / 2


def reductions(program):
    """Returns the number of reductions of more than a megabyte in a step, with loops multiplied out."""
    transfers = read_program(program.text, program.mesh_sizes, platform='tpu').transfers
    return sum(each.count for each in transfers if 'reduce' in each.kind and each.size > 1e6)


@pytest.mark.parametrize('zero_stage', [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_zero_1_gathers_and_reduces_once_per_step(sharded, zero_stage):
    micro_batches = {'train__global_batch_size': 4 * CHIPS, 'train__per_device_batch_size': 1}
    program = Program(model__remat_policy='full', mesh__zero_stage=zero_stage, **micro_batches)
    rows = 4 * BATCH * CHIPS // GLOBAL_BATCH
    assert program.memory['state'] == pytest.approx(size(sharded.state) / CHIPS + rows, rel=0.02)
    # Parameters are gathered before the layers, and none in the layers.
    assert program.count('all-gather') < sharded.count('all-gather')
    assert program.memory['temporary'] > 4 * sharded.memory['temporary']
    # Negative control: at stage 2, all layers reduce each of the four micro-batches.
    assert reductions(program) <= 4 if zero_stage == 1 else reductions(program) > 4 * 16


@pytest.mark.nightly
def test_tensor_parallel_blocks_have_two_all_reduces_per_pass():
    program = Program(mesh__tensor=4, mesh__data=4, mesh__fsdp=1)
    rows = GLOBAL_BATCH // 4
    stream = f'bf16[{rows},{WINDOW},{DIM}]'
    # All-reduces follow attention and feed-forward, in the forward and backward pass. One more is for the embedding,
    # which is sharded by vocabulary.
    assert program.count('all-reduce', stream) == 2 + 2 + 1
    assert program.count('all-gather') == 0
