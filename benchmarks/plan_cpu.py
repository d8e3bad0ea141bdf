"""Compares predicted with measured step times on this CPU.

    python -m benchmarks.plan_cpu [--steps=N] [--output=FILE]

For each config, the benchmark calibrates the machine (`calibrate_cpu`) and predicts the step time. It then times steps
of all configs in turns. Prints the ratio of predicted to measured medians, and writes JSON.
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
import numpy as np

from benchmarks.step import machine, random_batch
from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.planning.estimate.cpu import calibrate_cpu, num_cores
from maxlm.planning.estimate.roofline import step_time
from maxlm.planning.estimate.work import estimate_work
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state, init_state

# name → (config, overrides)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    'tiny': ('configs/tiny.py', ()),
    'tiny, nothing kept': ('configs/tiny.py', ('model.remat_policy=full',)),
    'tiny, window 512 in blocks': ('configs/tiny.py', ('data.seq_len=512', 'train.global_batch_size=4')),
    'tiny, two micro-batches': ('configs/tiny.py', ('train.per_device_batch_size=4',)),
    'neox:small': (
        'configs/neox.py:smoke',
        (
            *('model.num_layers=4', 'model.dim=256', 'model.ffn_dim=1024', 'data.seq_len=256'),
            *('train.num_steps=50', 'train.global_batch_size=8'),
        ),
    ),
    'depth:4': (
        'configs/depth.py:4-2025',
        ('data.seq_len=256', 'train.global_batch_size=8', 'train.per_device_batch_size=8', 'model.dtype=float32'),
    ),
    'mix:tiny': (
        'configs/mix.py:tiny',
        ('data.seq_len=128', 'train.global_batch_size=2', 'train.per_device_batch_size=2', 'model.dtype=float32'),
    ),
}
VOCAB = 4096


class Case:
    """A compiled step of a config with state and batch."""

    def __init__(self, spec: str, overrides: tuple[str, ...]):
        config = load(spec, overrides)
        vocab_size = config.model.vocab_size or VOCAB
        self.config = resolve(config, platform='cpu', num_devices=1, vocab_size=vocab_size, windows=1)
        layout = make_layout(self.config.mesh, jax.devices()[:1])
        self.step = compile_train_step(self.config, layout, abstract_state(self.config, layout)).step
        self.state = init_state(self.config, layout)
        rows, window = self.config.train.global_batch_size, self.config.data.seq_len
        batch = random_batch(np.random.default_rng(0), rows, window, vocab_size, 500)
        self.batch = layout.put_batch(batch, rows)
        self.predicted: list[float] = []
        self.measured: list[float] = []

    def predict(self) -> None:
        """Calibrates the machine and predicts the step time."""
        cpu = calibrate_cpu(self.config)
        self.parts = step_time(
            estimate_work(self.config),
            cpu.chip,
            num_devices=1,
            num_islands=1,
            mesh_sizes=self.config.mesh.sizes,
            dtype=self.config.model.dtype,
            efficiency=cpu.efficiency,
        )
        self.cpu = cpu
        self.predicted.append(self.parts.total)

    def run(self) -> float:
        """Runs one step and returns its seconds."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def main(argv: list[str]) -> int:
    """Measures all cases."""
    parser = ArgumentParser(prog='benchmarks.plan_cpu', allow_abbrev=False, description=__doc__)
    parser.add_argument('--steps', type=int, default=9, help='steps of each config that count (default 9)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    cases = {name: Case(*case) for name, case in CASES.items()}
    for case in cases.values():
        case.run()
    for turn in range(options.steps):
        for case in cases.values():
            if turn % 3 == 0:
                case.predict()
            case.measured.append(case.run())
    results = {name: _result(case) for name, case in cases.items()}
    for name, of in results.items():
        spread = f'({of["measured_min"] * 1e3:.0f}–{of["measured_max"] * 1e3:.0f})'
        print(
            f'{name:28} predicted {of["predicted"] * 1e3:8.1f} ms, measured {of["measured"] * 1e3:8.1f} {spread}, '
            f'ratio {of["ratio"]:.2f}'
        )
    worst = max(abs(math.log(of['ratio'])) for of in results.values())
    print(f'furthest off: a factor of {math.exp(worst):.2f}')
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        # A load above the number of cores means that other processes disturbed the times.
        document = {'cores': num_cores(), 'load': os.getloadavg(), 'machine': machine(), 'cases': results}
        options.output.write_text(json.dumps(document, indent=1) + '\n')
    return EXIT_DONE


def _result(case: Case) -> dict[str, Any]:
    predicted, measured = statistics.median(case.predicted), statistics.median(case.measured)
    return {
        'predicted': predicted,
        'measured': measured,
        'measured_min': min(case.measured),
        'measured_max': max(case.measured),
        'ratio': predicted / measured,
        'parts': {name: value for name, value in case.parts._asdict().items() if value},
        'efficiency': case.cpu.efficiency._asdict(),
        'tflops': case.cpu.chip.tflops,
        'memory_bandwidth': case.cpu.chip.memory_bandwidth,
    }


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
