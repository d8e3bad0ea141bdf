"""Rounding kernels in a step compiled for an absent GPU: one for each array, and fewer bytes than with XLA's."""

import functools
import json

import jax
import pytest

from tests.conftest import ROOT
from tests.gpu_compiler import NEEDS_COMPILER, run_python

# Prints the rounding kernels of the compiled step, and its traffic.
PROGRAM = """
import json, sys
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.planning.compiled.program import read_program
from maxlm.planning.compiled.traffic import ROUNDING, elementwise_bytes
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.compile import AHEAD_OPTIONS, compile_train_step
from maxlm.training.state import abstract_state

spec, *overrides = sys.argv[1:]
target = parse_target('h100:1')
config = resolve(load(spec, overrides), platform='gpu', num_devices=1, vocab_size=1024, windows=100)
layout = target_layout(target, config.mesh)
with compiling_for(target):
    step = compile_train_step(config, layout, abstract_state(config, layout), options=AHEAD_OPTIONS['gpu']).step
program = read_program(step.as_text(), config.mesh.sizes, platform='gpu')
calls = [kernel for kernel in program.traffic if kernel.cause == ROUNDING and kernel.name.startswith('pallas_call')]
print(json.dumps({'calls': sum(kernel.executions for kernel in calls), 'bytes': elementwise_bytes(program.traffic)}))
"""
LAYERS, MICRO_BATCHES = 2, 2
SHORT = (f'model.num_layers={LAYERS}', 'train.global_batch_size=16', 'model.vocab_size=1024')
DELAYED = ('model.matmul_precision=fp8', 'model.fp8_scaling=delayed')
pytestmark = [
    *NEEDS_COMPILER,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        jax.__version_info__ >= (0, 11), reason='this version of JAX compiles Triton kernels only with a GPU'
    ),
]


@functools.cache
def compiled(kernel):
    done = run_python('-c', PROGRAM, f'{ROOT}/configs/1b.py', *SHORT, *DELAYED, f'model.fp8_kernel={kernel}')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_one_kernel_rounds_each_array():
    # Inputs of attention, of its output, of the layer and of the activation; six gradients of their outputs.
    assert compiled('pallas')['calls'] == (4 + 6) * LAYERS * MICRO_BATCHES


@pytest.mark.nightly
def test_xla_moves_more_bytes():
    """Negative control of the previous test."""
    plain = compiled('xla')
    assert plain['calls'] == 0
    assert compiled('pallas')['bytes'] < 0.9 * plain['bytes']
