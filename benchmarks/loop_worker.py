"""Measures the bare step of a config for `benchmarks.loop`, with batches on the device.

    python -m benchmarks.loop_worker --config=FILE [--config.section.key=value …] --vocab-size=N --steps=N --warmup=N

Prints a JSON object: Unix time at the end of the first step, seconds per step after the warm-up, and the machine.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np

from benchmarks.step import machine, random_batch
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state, init_state

MEAN_DOCUMENT = 1000


def main(argv: list[str]) -> int:
    """Measures one config."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.loop_worker', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True)
    parser.add_argument('--vocab-size', type=int, required=True)
    parser.add_argument('--steps', type=int, required=True)
    parser.add_argument('--warmup', type=int, required=True)
    options = parser.parse_args(rest)
    config = resolve(
        load(options.config, overrides),
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=options.vocab_size,
        windows=1,
    )
    layout = make_layout(config.mesh)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state = init_state(config, layout)
    rng = np.random.default_rng(0)
    rows, window = config.train.global_batch_size, config.data.seq_len
    batches = [
        layout.put_batch(random_batch(rng, rows, window, config.model.vocab_size, MEAN_DOCUMENT), rows)
        for _ in range(4)
    ]
    state, metrics = step(state, batches[0])
    jax.block_until_ready(metrics)
    first_step_at = time.time()
    start = time.perf_counter()
    for number in range(options.warmup + options.steps):
        if number == options.warmup:
            jax.block_until_ready(metrics)
            start = time.perf_counter()
        before = metrics
        state, metrics = step(state, batches[number % len(batches)])
        # One step runs and one is queued, as in a run.
        jax.block_until_ready(before)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - start) / max(options.steps, 1)
    assert np.isfinite(float(metrics['loss'])), 'a step without a finite loss may have been faster than a real one'
    print(json.dumps({'first_step_at': first_step_at, 'step_seconds': seconds, 'machine': machine()}))
    return EXIT_DONE


if __name__ == '__main__':
    # `maxlm train` does this too.
    disable_malloc_trim()
    sys.exit(exit_code(main, sys.argv[1:]))
