"""Compares the training step on one GPU with PyTorch: `python -m benchmarks.peers_gpu [--size=1.3B] [--output=FILE]`.

A GPT-2 is trained by maxlm and by a plain PyTorch GPT with `torch.compile`, flash attention and fused AdamW. Both sides
have the same weights, tokens and optimizer, and compute in bfloat16 with float32 parameters. Each side is a process
that has the GPU alone during its turns. If the memory allows, the processes alternate; otherwise the second starts
after the first has exited. The losses of the first steps are compared; ratios compare medians over the turns. Needs a
GPU, jax, flax, optax, ml_collections and torch; takes about two minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_peer import SIDES, Task
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.planning.machine import GPU_FRACTION
from maxlm.training.flops import training_flops

SIZES = {
    # Shape of the NeoX model of 1.2B, whose blocks do the same work. The vocabulary size is a multiple of 64, which is
    # efficient on GPUs.
    '1.3B': {'num_layers': 24, 'dim': 2048, 'num_heads': 16, 'window': 2048, 'batch': 8, 'vocab_size': 50_304},
    '0.8B': {'num_layers': 24, 'dim': 1536, 'num_heads': 24, 'window': 2048, 'batch': 8, 'vocab_size': 50_304},
    'tiny': {'num_layers': 2, 'dim': 32, 'num_heads': 2, 'window': 32, 'batch': 4, 'vocab_size': 128},
}
# Duration of a turn in seconds.
TURN_SECONDS = 2.5
# Relative difference of losses caused by bfloat16's 8 bits. Losses are means over many tokens: on the tiny model they
# agree to 3e-5, while four updates change them by 1e-3.
TOLERANCE = 5e-4
# Fraction of the device's memory that a side may reserve if a second, similar process should run at the same time.
SHARE = 0.4


class SideError(Exception):
    """A side exited before its work was done."""

    def __init__(self, side: str, code: int):
        super().__init__(f'{side} ended with exit code {code}')
        self.code = code


class Side:
    """A training process, which does not use the GPU before `start`."""

    def __init__(self, name: str, task: Task):
        environment = {
            **os.environ,
            'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
            'XLA_PYTHON_CLIENT_MEM_FRACTION': str(GPU_FRACTION),
        }
        if task.device == 'cpu' or name != 'maxlm':
            # JAX initializes the weights for PyTorch on the host.
            environment['JAX_PLATFORMS'] = 'cpu'
        command = [sys.executable, '-m', 'benchmarks.gpu_peer', name, json.dumps(task._asdict())]
        self.name = name
        self.seconds: list[float] = []
        self.steps = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self) -> None:
        """Compiles, runs the first steps and determines the number of steps per turn."""
        self.first = self._ask('start')
        self.memory = self.first['memory']
        self.steps = max(1, round(TURN_SECONDS / self._ask('2')['seconds']))
        print(f'{self.name}: ready after {self.first["start_seconds"]:.0f} s', flush=True)

    def turn(self) -> None:
        """Runs the steps of one turn."""
        answer = self._ask(str(self.steps))
        self.seconds.append(answer['seconds'])
        self.memory = answer['memory']

    def end(self) -> None:
        """Kills the process."""
        if self._process.poll() is None:
            self._process.terminate()
        # communicate() waits for the process and closes its pipes.
        self._process.communicate()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise SideError(self.name, self._process.wait()) from None
        answer = self._process.stdout.readline()
        if not answer:
            raise SideError(self.name, self._process.wait())
        return json.loads(answer)


def measure(names: list[str], task: Task, rounds: int) -> dict[str, Any]:
    """Measures all sides in turns; ratios are relative to the first side."""
    sides = [Side(name, task) for name in names]
    first = sides[0]
    try:
        first.start()
        together = fits_beside_another(first.memory)
        if not together:
            for _ in range(rounds):
                first.turn()
            first.end()
        for side in sides[1:]:
            side.start()
            if not together:
                for _ in range(rounds):
                    side.turn()
                side.end()
        for number in range(rounds if together else 0):
            # Alternating the order puts each side equally often first and last.
            for side in sides if number % 2 else reversed(sides):
                side.turn()
    finally:
        for side in sides:
            side.end()
    return summarize(sides, task, together)


def fits_beside_another(memory: dict[str, int | None]) -> bool:
    """Returns True if a second side fits into the memory. Sides without memory statistics run on a CPU and fit."""
    held, limit = memory['held'], memory['limit']
    return held is None or limit is None or held <= SHARE * limit


def find_mistakes(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns a message for each side whose losses of the first steps differ from those of the first side."""
    expected = next(iter(losses.values()))
    return [
        f'{name} computes something else: losses {list(found)} instead of {list(expected)}'
        for name, found in losses.items()
        # The negated comparison also catches NaN.
        if not np.allclose(found, expected, rtol=TOLERANCE, atol=0)
    ]


def summarize(sides: list[Side], task: Task, together: bool) -> dict[str, Any]:
    """Returns the measurements by side."""
    config = task.config
    tokens = config.train.global_batch_size * config.data.seq_len
    flops, medians = training_flops(config.model, config.data.seq_len), {}
    results = {}
    peak = sides[0].first['versions']['peak_tflops'] * 1e12
    for side in sides:
        seconds = medians[side.name] = statistics.median(side.seconds)
        results[side.name] = {
            'step_seconds': seconds,
            'turns': side.seconds,
            'steps_per_turn': side.steps,
            'tokens_per_second': tokens / seconds,
            'mfu_causal': tokens / seconds * flops.causal / peak if peak else None,
            'peak_memory_bytes': side.memory['peak'],
            **side.first,
            'memory': side.memory,
        }
    others = [seconds for name, seconds in medians.items() if name != sides[0].name]
    return {
        'sizes': task.sizes,
        'remat': config.model.remat_policy,
        'attention': config.model.attention,
        'together': together,
        'mistakes': find_mistakes({side.name: side.first['losses'] for side in sides}),
        'sides': results,
        'peak_tflops': peak / 1e12,
        'ratio': min(others) / medians[sides[0].name] if others else None,
    }


def main(argv: list[str]) -> int:
    """Measures and prints a table."""
    parser = ArgumentParser(prog='benchmarks.peers_gpu', allow_abbrev=False, description=__doc__)
    parser.add_argument('--size', choices=SIZES, default='1.3B', help='of the model (default 1.3B)')
    parser.add_argument('--batch', type=int, help='sequences of a step (default: those of the size)')
    parser.add_argument('--sides', default='maxlm,torch', help=f'of {", ".join(SIDES)} (default maxlm,torch)')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each side (default 5)')
    parser.add_argument('--device', choices=('gpu', 'cpu'), default='gpu', help='cpu: for a trial, with --size=tiny')
    parser.add_argument('--eager', action='store_true', help='without torch.compile, for a trial')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    names = options.sides.split(',')
    if not set(names) <= SIDES.keys():
        raise InputError(f'--sides={options.sides}: there are {", ".join(SIDES)}')
    if len(names) > 1 and importlib.util.find_spec('torch') is None:
        raise InputError('PyTorch is not installed here: pip install torch, or --sides=maxlm')
    sizes = SIZES[options.size] | ({'batch': options.batch} if options.batch else {})
    try:
        result = measure(names, Task(sizes, options.device, not options.eager), options.rounds)
    except SideError as error:
        print(f'error: {error}', file=sys.stderr)
        return EXIT_BAD_INPUT if error.code == EXIT_BAD_INPUT else EXIT_FAILED
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_FAILED if result['mistakes'] else EXIT_DONE


def _print(result: dict[str, Any]) -> None:
    print('| side | step, ms | turns, ms | tokens/s | MFU, causal | peak memory, GiB | first loss | last compared |')
    print('|---|---:|---:|---:|---:|---:|---:|---:|')
    for name, side in result['sides'].items():
        turns = f'{min(side["turns"]) * 1e3:.1f}–{max(side["turns"]) * 1e3:.1f}'
        mfu = '' if side['mfu_causal'] is None else f'{side["mfu_causal"]:.1%}'
        memory = '' if side['peak_memory_bytes'] is None else f'{side["peak_memory_bytes"] / 2**30:.1f}'
        print(
            f'| {name} | {side["step_seconds"] * 1e3:.1f} | {turns} | {side["tokens_per_second"]:,.0f} | {mfu} | '
            f'{memory} | {side["losses"][0]:.4f} | {side["losses"][-1]:.4f} |'
        )
    print(*result['mistakes'], sep='\n')
    if result['ratio'] is not None:
        print(f'fastest other side / {next(iter(result["sides"]))}: {result["ratio"]:.3f}')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
