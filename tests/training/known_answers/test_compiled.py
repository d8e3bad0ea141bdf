"""Compiles the known-answer tests of a run for absent GPUs."""

import json

from tests.gpu_compiler import needs_gpu_compiler, run_python

# Compiles the kernels of a config and their formulas for a GPU, and prints the targets of the kernels' calls.
PROGRAM = """
import json, re, sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.training.known_answers.answer import on_each
from maxlm.training.known_answers.kernels import training_answers
from maxlm.planning.targets import compiling_for, parse_target, target_devices

spec, *overrides = sys.argv[1:]
config = load(spec, overrides)
config = resolve(config, platform='gpu', num_devices=1, vocab_size=32_000, windows=100, capability=(9, 0))
target = parse_target('h100:2')
mesh = Mesh(np.array(target_devices(target)), ('device',))
found = {}
for answer in training_answers(config):
    replicated = NamedSharding(mesh, PartitionSpec())
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), answer.inputs)
    with compiling_for(target):
        # Without the device, XLA cannot choose between Triton and cuBLAS.
        options = {'xla_gpu_enable_triton_gemm': False}
        program = on_each(answer.run, mesh).lower(*inputs).compile(options)
        formula = on_each(answer.exact, mesh).lower(*inputs).compile()
    targets = set(re.findall(r'custom_call_target="([^"]*)"', program.as_text()))
    memory = [each.memory_analysis().temp_size_in_bytes for each in (program, formula)]
    found.setdefault(answer.kernel, []).append([answer.shape, sorted(targets), max(memory)])
print(json.dumps(found))
"""
SMALL = ('train.global_batch_size=4', 'train.per_device_batch_size=2', 'model.matmul_precision=fp8')


@needs_gpu_compiler
def test_the_kernels_of_a_run_compile_for_an_absent_gpu():
    done = run_python('-c', PROGRAM, 'configs/1b.py', *SMALL, JAX_PLATFORMS='cpu')
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ((shape, targets, _),) = found['attention within documents (model.attention=cudnn)']
    assert shape == '2 × 2,048 tokens, 24 query heads and 24 key heads of 64'
    assert {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'} <= set(targets)
    for _, targets, _ in found['product in fp8']:
        assert '__cublas$lt$matmul$f8' in targets
    assert max(each[2] for rows in found.values() for each in rows) < 4 * 2**30
