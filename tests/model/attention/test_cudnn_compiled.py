"""Steps of real models compiled for absent GPUs: cuDNN gets the documents, and there is no mask.

Each compilation takes up to a minute.
"""

import functools
import json

import pytest

from tests.conftest import ROOT
from tests.gpu_compiler import NEEDS_COMPILER, run_python

# Prints the contents of the compiled program, with documents passed to cuDNN or with a mask.
PROGRAM = """
import json, re, sys
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.model.attention import kernels
from maxlm.training.compile import compile_train_step
from maxlm.planning.compiled.program import read_program
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.state import abstract_state

spec, target, variant, *overrides = sys.argv[1:]
target = parse_target(target)
config = load(spec, overrides)
config = resolve(config, platform='gpu', num_devices=target.num_devices, vocab_size=32_000, windows=100)
if variant == 'masked':
    kernels.supports_documents = lambda *_: False
layout = target_layout(target, config.mesh)
with compiling_for(target):
    step = compile_train_step(config, layout, abstract_state(config, layout))
text = step.step.as_text()
program = read_program(text, config.mesh.sizes)
T = config.data.seq_len
gathered = [
    re.search(r'op_name="([^"]*)"', line)[1]
    for line in text.splitlines()
    if re.search(r'(all-gather|all-to-all|collective-permute)(-start)?\\(', line) and 'op_name' in line
]
print(json.dumps({
    'kernels': program.kernels,
    'layers': config.model.num_layers * config.accumulation,
    'masks': re.findall(rf'\\w+\\[[\\d,]*{T},{T}\\]', text),
    'gathered': [name for name in gathered if 'shard_map' in name or 'dot_product_attention' in name],
    'windows': sorted({int(size) for size in re.findall(r'"sliding_window_length": ?"?(\\d+)', text)}),
    'temporary': step.memory_bytes()['temporary'],
}))
"""
pytestmark = NEEDS_COMPILER
FORWARD, BACKWARD = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
# A model with few layers compiles to the same program, because its layers are in a loop.
SHORT = ('model.num_layers=4', 'train.global_batch_size=32', 'train.per_device_batch_size=2')
LONG_WINDOW = ('data.seq_len=4096', 'model.max_positions=4096')
HEADS_SPLIT = ('model.remat_policy=dots', 'mesh.fsdp=4', 'mesh.tensor=2')
GROUPED = ('model.remat_policy=none', 'model.num_kv_heads=8')
SLIDING = ('model.attention_pattern=SL', 'model.sliding_window=512')


@functools.cache
def compiled(target, variant, *overrides):
    """Compiles in a process with the GPU compiler that launch/test.sh installs."""
    done = run_python('-c', PROGRAM, f'{ROOT}/configs/1b.py', target, variant, *SHORT, *LONG_WINDOW, *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ('overrides', 'windows'),
    [(HEADS_SPLIT, [0]), pytest.param((*GROUPED, *SLIDING), [0, 512], marks=pytest.mark.nightly)],
    ids=['heads_split', 'grouped_and_sliding'],
)
def test_no_mask_is_left(overrides, windows):
    found = compiled('h100:8', 'documents', *overrides)
    # Recomputation in the backward pass would double the number of forward kernels.
    assert found['kernels'] == {FORWARD: found['layers'], BACKWARD: found['layers']}
    assert found['masks'] == []
    assert found['gathered'] == []
    assert found['windows'] == windows


@pytest.mark.nightly
def test_memory_of_a_mask():
    """Negative control of the previous test."""
    documents, masked = (compiled('h100:8', variant, *HEADS_SPLIT) for variant in ('documents', 'masked'))
    assert not {FORWARD, BACKWARD} & set(masked['kernels'])
    assert masked['masks']
    # The mask has 2 bytes for each pair of tokens; its inputs may be freed before.
    assert masked['temporary'] - documents['temporary'] > 2 * 4096**2
