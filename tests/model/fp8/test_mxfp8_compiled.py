"""MXFP8 in a step compiled for absent B200 GPUs: every product of the blocks is a call of cuDNN."""

import json

import pytest

from maxlm.errors import EXIT_DONE
from tests.conftest import ROOT
from tests.gpu_compiler import NEEDS_COMPILER, run_python

pytestmark = NEEDS_COMPILER
LAYERS, MICRO_BATCHES = 2, 2
# Queries, keys, values, output, up and down; each has a product forward and two backward.
PRODUCTS = 6 * 3
PROGRAM = """
import json, sys
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.planning.compiled.program import read_program
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.compile import AHEAD_OPTIONS, compile_train_step
from maxlm.training.state import abstract_state

spec, *overrides = sys.argv[1:]
target = parse_target('b200:8')
sizes = {'num_devices': 8, 'vocab_size': 1024, 'windows': 100}
config = resolve(load(spec, overrides), platform='gpu', capability=target.chip.capability, **sizes)
layout = target_layout(target, config.mesh)
with compiling_for(target):
    step = compile_train_step(config, layout, abstract_state(config, layout), options=AHEAD_OPTIONS['gpu']).step
text = step.as_text()
program = read_program(text, config.mesh.sizes, platform='gpu')
kernels = [each for each in program.traffic if each.cause == 'matrix products']
lines = {line.split(' = ')[0].strip().lstrip('%') for line in text.splitlines() if '__cudnn$blockScaledDot' in line}
print(json.dumps(sum(each.executions for each in kernels if each.name in lines)))
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_product_of_the_blocks_is_in_mxfp8():
    overrides = ('model.matmul_precision=mxfp8', f'model.num_layers={LAYERS}', 'model.vocab_size=1024')
    batch = f'train.global_batch_size={8 * 8 * MICRO_BATCHES}'
    done = run_python('-c', PROGRAM, f'{ROOT}/configs/1b.py', *overrides, batch)
    assert done.returncode == EXIT_DONE, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == LAYERS * MICRO_BATCHES * PRODUCTS
