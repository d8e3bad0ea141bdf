"""Rounding kernels in a step compiled for an absent GPU: one for each array, and fewer bytes than with XLA's."""

import functools

import jax
import pytest

from tests.gpu_compiler import NEEDS_COMPILER, compiled_step

# Prints the rounding kernels of the compiled step, and its traffic.
REPORT = """
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
    return compiled_step(REPORT, *SHORT, *DELAYED, f'model.fp8_kernel={kernel}')


def test_one_kernel_rounds_each_array():
    # Inputs of attention, of its output, of the layer and of the activation; six gradients of their outputs.
    assert compiled('pallas')['calls'] == (4 + 6) * LAYERS * MICRO_BATCHES


@pytest.mark.nightly
def test_xla_moves_more_bytes():
    """Negative control of the previous test."""
    plain = compiled('xla')
    assert plain['calls'] == 0
    assert compiled('pallas')['bytes'] < 0.9 * plain['bytes']
