"""Computes each training step twice from the same state and batch, and compares the results bit by bit.

    python -m benchmarks.gpu_replay --config=configs/1b.py [--config.section.key=value …] [--steps=200] [--output=FILE]

Compares the loss, the gradient norm and the checksums of all parameters on the devices. Differences within rounding
are expected from kernels that add in any order. With --exact every difference fails. Prints and writes the number of
steps that differ, and exits with 1 on a failure. Needs jax, flax, optax, orbax-checkpoint and ml_collections.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step import machine, resolve_here
from benchmarks.text_steps import text_batches
from maxlm.checkpoint.checksums import start_checksums
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.training.batch import Batch
from maxlm.training.compile import compile_train_step
from maxlm.training.decisions.replay import Cause, Rounding, StepResult, find_cause
from maxlm.training.state import TrainState, abstract_state, init_state

# Number of differing steps that the result describes.
DESCRIBED = 20


def main(argv: list[str]) -> int:
    """Computes the steps, and prints and writes the results."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.gpu_replay', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--steps', type=int, default=200, help='steps, each computed twice (default 200)')
    parser.add_argument('--exact', action='store_true', help='fail on differences within rounding too')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    if options.steps < 1:
        raise InputError(f'--steps={options.steps}: needs 1 or more')
    config = resolve_here(options.config, overrides)
    found = replay(config, options.steps)
    result = {
        'name': options.config,
        'overrides': overrides,
        'xla_flags': os.environ.get('XLA_FLAGS', ''),
        'exact': options.exact,
        **found,
        'machine': machine(),
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    print(
        f'{found["steps"]} steps computed twice: {found["different"]} differ, {found["beyond_rounding"]} beyond '
        f'rounding; {found["step_seconds"] * 1e3:.1f} ms per computation'
    )
    return EXIT_FAILED if found['beyond_rounding'] or (options.exact and found['different']) else EXIT_DONE


def replay(config: Config, steps: int) -> dict[str, Any]:
    """Computes each step of a resolved config twice and continues from the first result.

    Returns:
        The number of steps that differ in any bit and beyond rounding, descriptions of the first ones, and the median
        seconds of one computation.
    """
    layout = make_layout(config.mesh)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    state = init_state(config, layout)
    differences: list[dict[str, Any]] = []
    seconds = []
    for number, batch in enumerate(text_batches(config, layout, steps)):
        before = copy(state)
        state, first, first_seconds = _compute(step, state, batch)
        _, second, second_seconds = _compute(step, before, batch)
        seconds += [first_seconds, second_seconds]
        if difference := compare(first, second, dtype=config.model.dtype):
            differences.append({'step': number, **difference})
            print(f'step {number}: {json.dumps(difference)}', flush=True)
    assert math.isfinite(first.loss), 'a step without a finite loss shows nothing'
    return {
        'steps': steps,
        'different': len(differences),
        'beyond_rounding': sum(each['beyond_rounding'] for each in differences),
        'differences': differences[:DESCRIBED],
        'loss': first.loss,
        'step_seconds': statistics.median(seconds),
    }


def compare(first: StepResult, second: StepResult, *, dtype: str) -> dict[str, Any] | None:
    """Returns a description of the differences between two computations of a step, or None if all bits are equal."""
    cause = find_cause(first, second, dtype=dtype, is_deterministic=False)
    if cause is Cause.DATA:
        return None
    return {
        **{name: (getattr(first, name), getattr(second, name)) for name in Rounding._fields},
        'changed_arrays': int(np.any(first.checksums != second.checksums, axis=0).sum()),
        'arrays': first.checksums.shape[1],
        'beyond_rounding': cause is Cause.DEVICE,
    }


def _compute(step: Any, state: TrainState, batch: Batch) -> tuple[TrainState, StepResult, float]:
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds = time.perf_counter() - start
    metrics, checksums = jax.device_get((metrics, start_checksums({'params': state.params})['params']))
    return state, StepResult(checksums=checksums, **{name: float(metrics[name]) for name in Rounding._fields}), seconds


if __name__ == '__main__':
    # `maxlm train` does this too.
    disable_malloc_trim()
    sys.exit(exit_code(main, sys.argv[1:]))
