"""Norm kernels in steps compiled for absent GPUs: one for each norm and pass, and no copies of the residual stream."""

import json

import pytest

from tests.conftest import ROOT
from tests.gpu_compiler import NEEDS_COMPILER, run_python

# Prints the custom calls of the compiled step by kernel, and the number of copies of arrays as large as the stream.
PROGRAM = """
import json, sys
from collections import Counter
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.planning.compiled.hlo import parse_hlo
from maxlm.planning.compiled.traffic import bytes_by_cause, elementwise_kernels, read_traffic
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state

spec, target, *overrides = sys.argv[1:]
target = parse_target(target)
config = load(spec, overrides)
config = resolve(config, platform='gpu', num_devices=target.num_devices, vocab_size=1024, windows=100)
layout = target_layout(target, config.mesh)
with compiling_for(target):
    text = compile_train_step(config, layout, abstract_state(config, layout)).step.as_text()
traffic = read_traffic(parse_hlo(text))
print(json.dumps({
    'kernels': dict(Counter(kernel.name.split('.')[0] for kernel in traffic if kernel.cause == 'norm')),
    'bytes': bytes_by_cause(traffic),
}))
"""
pytestmark = NEEDS_COMPILER
