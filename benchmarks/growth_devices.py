"""Measures the host cost of a step over the number of devices: Python, batch placement, compilation and communication.

    python -m benchmarks.growth_devices DATASET STEPS FILE

This command trains on all devices and writes statistics of the steps to FILE. `measure` starts it with virtual CPU
devices, whose number is fixed when a process starts. Times are CPU times of the main thread, so they exclude waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.data import random_tokens, write_dataset
from benchmarks.growth_curves import Curve
from benchmarks.growth_steps import count_instructions
from maxlm.cli.runs import train
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.parallel.layout import Layout
from maxlm.planning.compiled.program import read_program
from maxlm.planning.estimate.memory import estimate_memory
from maxlm.planning.estimate.work import estimate_work
from maxlm.trainer.step_runner import StepRunner

ROOT = Path(__file__).parent.parent
DEVICES = (1, 2, 4, 8, 16, 32)
PLANNED = (8, 64, 512, 4096, 32768)
STEPS = 40
# Rounds per process.
STARTS = 4
# Steps in which JAX fills its caches.
WARMUP = 4
SETTINGS: dict[str, Any] = {
    'model.num_layers': 2,
    'model.dim': 64,
    'model.num_heads': 2,
    'model.ffn_dim': 128,
    'data.seq_len': 64,
    'train.global_batch_size': 32,
    'train.log_every': 10**6,
    'train.compilation_cache_dir': '',
    'optimizer.warmup_steps': 0,
    'eval.interval': 0,
    'checkpoint.save_interval_steps': 0,
    'metrics.tensorboard': 'false',
    'metrics.peak_tflops': 1,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """CPU seconds and number of function calls of one step, and of the placement of its batch."""

    step_seconds: float
    step_calls: int
    placing_seconds: float
    placing_calls: int


class Probe:
    """Context manager that measures training steps by patching the functions of the loop."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.stepping: StepRunner | None = None
        self._calls = 0
        self._placing = 0.0, 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Probe:
        original_step, put_batch = StepRunner.step, Layout.put_batch

        def measured_put(layout: Layout, *arguments: Any) -> Any:
            batch, seconds, calls = self._measure(partial(put_batch, layout, *arguments))
            self._placing = seconds, calls
            return batch

        def measured_step(loop: StepRunner, *arguments: Any, **options: Any) -> Any:
            self.stepping = loop
            # Counting calls is slow, so every second step is timed without it.
            counts = len(self.samples) % 2 == 1
            if counts:
                sys.setprofile(self._count)
            try:
                state, seconds, calls = self._measure(partial(original_step, loop, *arguments, **options))
            finally:
                sys.setprofile(None)
            self.samples.append(Sample(seconds, calls, *self._placing))
            return state

        self._patches.enter_context(mock.patch.object(StepRunner, 'step', measured_step))
        self._patches.enter_context(mock.patch.object(Layout, 'put_batch', measured_put))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def figures(self) -> dict[str, float]:
        """Returns medians of times and minimum call counts, since garbage collection and late batches add calls."""
        timed, counted = self.samples[WARMUP::2], self.samples[WARMUP + 1 :: 2]
        return {
            'placing_seconds': statistics.median(sample.placing_seconds for sample in timed),
            'rest_seconds': statistics.median(sample.step_seconds - sample.placing_seconds for sample in timed),
            'placing_calls': min(sample.placing_calls for sample in counted),
            'rest_calls': min(sample.step_calls - sample.placing_calls for sample in counted),
        }

    def _measure(self, action: Any) -> tuple[Any, float, int]:
        start, before = time.thread_time(), self._calls
        done = action()
        return done, time.thread_time() - start, self._calls - before

    def _count(self, _: Any, event: str, __: Any) -> None:
        self._calls += event in ('call', 'c_call')


def main(argv: list[str]) -> int:
    """Trains for some steps and writes their statistics."""
    dataset, steps, output = argv
    with tempfile.TemporaryDirectory() as workdir, Probe() as probe:
        settings = {**SETTINGS, 'data.path': dataset, 'train.num_steps': steps}
        overrides = [f'--config.{key}={value}' for key, value in settings.items()]
        code = train.main([f'--config={ROOT}/configs/tiny.py', f'--workdir={workdir}/run', *overrides])
        if code != EXIT_DONE:
            return code
        assert probe.stepping is not None
        config, compiled = probe.stepping._program
        assert compiled is not None
        text = compiled.step.as_text() or ''
        program = read_program(text, config.mesh.sizes)
        figures = {
            **probe.figures(),
            'devices': jax.device_count(),
            'compile_seconds': compiled.seconds,
            'instructions': count_instructions(text),
            'sent_bytes': sum(transfer.sent for transfer in program.transfers),
            'memory_bytes': compiled.total_bytes(),
        }
    Path(output).write_text(json.dumps(figures) + '\n')
    return EXIT_DONE


def run_on(devices: int, dataset: Path, steps: int = STEPS) -> dict[str, float]:
    """Returns the statistics of a process with a number of virtual CPU devices."""
    flags = [flag for flag in os.environ.get('XLA_FLAGS', '').split() if 'device_count' not in flag]
    flags.append(f'--xla_force_host_platform_device_count={devices}')
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(flags)}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / 'figures.json'
        command = [sys.executable, '-m', 'benchmarks.growth_devices', str(dataset), str(steps), str(output)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == EXIT_DONE, done.stderr
        return json.loads(output.read_text())


def measure(rounds: int, sizes: Sequence[int] = DEVICES) -> list[Curve]:
    """Measures over the number of devices of a process. The processes share cores and batch size and run in turns."""
    results: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as directory:
        dataset = write_dataset(random_tokens(200_000), Path(directory) / 'data', 2)
        # A process runs many steps and starts slowly, so one process covers several rounds.
        for _ in range(-(-rounds // STARTS)):
            for size, of_size in results.items():
                of_size.append(run_on(size, dataset.path))

    def curve(name: str, unit: str, key: str, expected: float, why: str, first: int = 0) -> Curve:
        values = tuple(statistics.median(result[key] for result in of_size) for of_size in results.values())
        return Curve(name, unit, tuple(map(float, sizes))[first:], values[first:], expected, why)

    placement = 'upper bound: one array per device, one call for all'
    return [
        curve('batch placement time', 's', 'placing_seconds', 1.0, placement),
        curve('other loop time', 's', 'rest_seconds', 1.0, 'upper bound: the runtime launches each device'),
        curve('batch placement calls', '', 'placing_calls', 1.0, placement),
        curve('other loop calls', '', 'rest_calls', 0.0, 'one array object for all devices'),
        curve('compile time', 's', 'compile_seconds', 0.0, 'one program for all devices'),
        curve('instructions', '', 'instructions', 0.0, 'one program for all devices'),
        curve('device memory', 'B', 'memory_bytes', -1.0, 'shard of the state and of the batch'),
        # A single device sends nothing, so the curve starts at the second size.
        curve(
            'bytes sent per device', 'B', 'sent_bytes', 0.0, 'parameters and gradients except the own shard', first=1
        ),
    ]


def measure_planned(rounds: int, sizes: Sequence[int] = PLANNED) -> list[Curve]:
    """Measures loading a config and estimating its memory and work, over the number of planned devices."""
    seconds = {size: [_planning_seconds(size) for _ in range(rounds + 1)] for size in sizes}
    values = tuple(statistics.median(of_size[1:]) for of_size in seconds.values())
    why = 'multiplies axis sizes without listing devices'
    return [Curve('planning time', 's', tuple(map(float, sizes)), values, 0.0, why)]


def _planning_seconds(devices: int) -> float:
    start = time.perf_counter()
    overrides = ['mesh.fsdp=8', 'mesh.data=-1', f'train.global_batch_size={devices}', 'train.per_device_batch_size=1']
    config = load(f'{ROOT}/configs/1b.py', overrides)
    config = resolve(config, platform='gpu', num_devices=devices, vocab_size=config.model.vocab_size, windows=1)
    estimate_memory(config, 'gpu')
    estimate_work(config)
    return time.perf_counter() - start


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
