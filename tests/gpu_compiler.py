"""Processes with the GPU compiler that launch/test.sh installs, if it is installed, and their matrix products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from maxlm.planning.compiled.hlo import Instruction, Module
from maxlm.planning.compiled.matmuls import is_library_product, product_flops
from maxlm.planning.compiled.trip_counts import Scope, trip_count
from maxlm.planning.gpu_compiler import VARIABLE

ROOT = Path(__file__).parent.parent
# Directory of the GPU compiler; None if launch/test.sh has not installed it.
FOLDER = os.environ.get(VARIABLE)


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS…` with the GPU compiler, if installed, and additional environment variables."""
    environment = os.environ | ({VARIABLE: FOLDER} if FOLDER else {}) | variables
    # XLA_FLAGS of this process are for virtual CPU devices.
    del environment['XLA_FLAGS']
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


# Compiles the training step of configs/1b.py for one absent GPU as `step`, and counts its work as `program`.
STEP = """
import json, sys
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.planning.compiled.program import read_program
from maxlm.planning.compiled.traffic import ROUNDING, elementwise_bytes
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.compile import AHEAD_OPTIONS, compile_train_step
from maxlm.training.state import abstract_state

target = parse_target('h100:1')
config = resolve(load('configs/1b.py', sys.argv[1:]), platform='gpu', num_devices=1, vocab_size=1024, windows=100)
layout = target_layout(target, config.mesh)
with compiling_for(target):
    step = compile_train_step(config, layout, abstract_state(config, layout), options=AHEAD_OPTIONS['gpu']).step
program = read_program(step.as_text(), config.mesh.sizes, platform='gpu')
"""


def run_step(report: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs `STEP` with overrides of its config, and then the statements `report`, which print a JSON value."""
    return run_python('-c', STEP + report, *overrides)


def compiled_step(report: str, *overrides: str) -> Any:
    """Returns the value that `report` prints; see `run_step`."""
    done = run_step(report, *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Marks of tests that compile for GPUs in another process. CI skips none, since launch/test.sh installs the compiler.
NEEDS_COMPILER = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not FOLDER, reason=f'needs the compiler for GPUs: run launch/test.sh, or set {VARIABLE}'),
]


def needs_gpu_compiler(test: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the marks of `NEEDS_COMPILER` to a test."""
    for mark in NEEDS_COMPILER:
        test = mark(test)
    return test


class Counted(NamedTuple):
    """Executions per step and operations of one kind of matrix product."""

    runs: float
    flops: float


def library_products(module: Module) -> dict[str, Counted]:
    """Counts matrix products by cuBLAS call target; `dot` stands for XLA's own kernels."""
    counted: dict[str, Counted] = {}

    def visit(scope: Scope, times: float) -> None:
        for instruction in scope.computation.values():
            if instruction.opcode == 'while':
                rounds = trip_count(module, instruction, scope)
                body = module.computations[instruction.called['body']]
                visit(Scope(body, instruction, scope), times * (1 if rounds is None else rounds))
            elif instruction.called and instruction.opcode in ('fusion', 'call', 'async-start'):
                name = instruction.called.get('calls') or instruction.called['to_apply']
                visit(Scope(module.computations[name], instruction, scope), times)
            elif instruction.opcode == 'dot' or is_library_product(instruction):
                operands = [array for name in instruction.operands for array in scope.computation[name].arrays]
                runs, flops = counted.get(_kind(instruction), Counted(0, 0))
                more = times * product_flops(instruction, operands)
                counted[_kind(instruction)] = Counted(runs + times, flops + more)

    visit(Scope(module.entry), 1)
    return counted


def _kind(instruction: Instruction) -> str:
    return instruction.attribute(r'custom_call_target="([^"]*)"') or instruction.opcode
