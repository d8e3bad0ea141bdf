"""Norm kernels in a step compiled for an absent GPU: one for each norm and pass, and no copies of the stream."""

import functools

import jax
import pytest

from tests.gpu_compiler import NEEDS_COMPILER, compiled_step, run_step

# Prints the norm kernels of the compiled step, the kernels that copy the residual stream, and the traffic.
REPORT = """
stream = 2 * config.train.per_device_batch_size * config.data.seq_len * config.model.dim
norms = [kernel for kernel in program.traffic if kernel.name.startswith('pallas_call')]
print(json.dumps({
    'norms': [number for name, number in program.kernels.items() if 'triton' in name],
    'in_scope': sum(kernel.executions for kernel in norms if kernel.cause == 'norm'),
    'copies': [kernel.name for kernel in program.traffic if 'copy' in kernel.name and kernel.bytes == 2 * stream],
    'traffic': elementwise_bytes(program.traffic),
    'kernels': sum(kernel.executions for kernel in program.traffic),
}))
"""
pytestmark = NEEDS_COMPILER
LAYERS, MICRO_BATCHES = 2, 2
COMPILES_AHEAD = jax.__version_info__ < (0, 11)
AHEAD = pytest.mark.skipif(not COMPILES_AHEAD, reason='this version of JAX compiles Triton kernels only with a GPU')
SHORT = (f'model.num_layers={LAYERS}', 'train.global_batch_size=16', 'model.vocab_size=1024')


@functools.cache
def compiled(kernel):
    return compiled_step(REPORT, *SHORT, f'model.norm_kernel={kernel}')


@AHEAD
@pytest.mark.timeout(300)
def test_one_kernel_for_each_norm_and_pass():
    fused = compiled('pallas')
    # Two norms of each layer and the final one, forward and backward.
    assert fused['norms'] == [2 * MICRO_BATCHES * (2 * LAYERS + 1)]
    assert fused['norms'] == [fused['in_scope']]
    assert fused['copies'] == []


@AHEAD
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_xla_copies_the_stream():
    """Negative control of the previous test."""
    fused, plain = compiled('pallas'), compiled('xla')
    assert plain['norms'] == []
    assert plain['copies']
    assert fused['traffic'] < 0.95 * plain['traffic']
    assert fused['kernels'] < 0.95 * plain['kernels']


@pytest.mark.skipif(COMPILES_AHEAD, reason='this version of JAX compiles Triton kernels without a GPU')
def test_a_version_that_needs_a_gpu_is_named():
    done = run_step(REPORT, *SHORT, 'model.norm_kernel=pallas')
    assert done.returncode != 0
    assert 'InputError: model.norm_kernel=pallas: JAX 0.' in done.stderr
