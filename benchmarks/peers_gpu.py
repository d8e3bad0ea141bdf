"""Compares the training step on one GPU with PyTorch: `python -m benchmarks.peers_gpu [--size=1.3B] [--output=FILE]`.

A GPT-2 is trained by maxlm, by a plain PyTorch GPT and by Transformers. These sides have the same weights, tokens and
AdamW, and compute in bfloat16 with float32 parameters; the losses of their first steps are compared. nanochat trains
its own model of the same width and depth, so only its throughput is compared. Each side has its best settings, which
are printed:

- maxlm: the layout that `maxlm plan --search` recommends for this GPU.
- PyTorch and the others: `torch.compile` with `--compile`, flash attention, fused AdamW.
- All: the batch, of those in `--batches`, with the highest throughput. A batch may be too large for a side.

Each side is a process that has the GPU alone during its turns. If the memory allows, the processes alternate; otherwise
each starts after the previous one has exited. Ratios compare medians over the turns. Needs a GPU, jax, flax, optax,
ml_collections and torch; takes about two minutes per batch and side, most of it for `max-autotune`.
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

from benchmarks.gpu_peer import EXIT_NO_MEMORY, OTHER_MODELS, SIDES, Task
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
# Modes of torch.compile.
MODES = ('max-autotune', 'max-autotune-no-cudagraphs', 'default', 'none')
# Duration of a turn in seconds.
TURN_SECONDS = 2.5
# Relative difference of losses caused by bfloat16's 8 bits. Losses are means over many tokens: on the tiny model they
# agree to 3e-5, while four updates change them by 1e-3.
TOLERANCE = 5e-4
# Fraction of the device's memory that all sides may reserve together if they run at the same time.
SHARE = 0.8


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


def measure(names: Sequence[str], task: Task, rounds: int) -> dict[str, Any]:
    """Measures all sides in turns. Sides whose batch does not fit into the memory are absent from the result."""
    sides: list[Side] = []
    together = True
    waiting = [Side(name, task) for name in names]
    try:
        for side in waiting:
            try:
                side.start()
            except SideError as error:
                if error.code != EXIT_NO_MEMORY:
                    raise
                print(f'{side.name}: a batch of {task.sizes["batch"]} does not fit into the memory', flush=True)
                continue
            if not sides:
                together = fits_beside_others(side.memory, len(names))
            sides.append(side)
            if not together:
                for _ in range(rounds):
                    side.turn()
                side.end()
        for number in range(rounds if together else 0):
            # Alternating the order puts each side equally often first and last.
            for side in sides if number % 2 else reversed(sides):
                side.turn()
    finally:
        for side in waiting:
            side.end()
    return summarize(sides, task, together)


def sweep(names: Sequence[str], task: Task, batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measures all sides with each batch. The ratio is relative to the first side, and compares the best batches.

    Raises:
        InputError: no batch fits into the memory of a side.
    """
    results = [measure(names, task._replace(sizes={**task.sizes, 'batch': batch}), rounds) for batch in batches]
    best = {}
    for name in names:
        found = [result['sides'][name] for result in results if name in result['sides']]
        if not found:
            raise InputError(f'{name}: no batch of {",".join(map(str, batches))} fits into the memory; use --batches=1')
        best[name] = max(found, key=lambda side: side['tokens_per_second'])
    first, *others = [side['tokens_per_second'] for name, side in best.items() if name not in OTHER_MODELS]
    return {
        'sizes': {name: size for name, size in task.sizes.items() if name != 'batch'},
        'mistakes': [mistake for result in results for mistake in result['mistakes']],
        'sides': best,
        'ratio': first / max(others) if others else None,
        'batches': results,
    }


def fits_beside_others(memory: Mapping[str, int | None], number: int) -> bool:
    """Returns True if `number` similar sides fit into the memory. Sides without memory statistics run on a CPU."""
    held, limit = memory['held'], memory['limit']
    return held is None or limit is None or number * held <= SHARE * limit


def find_mistakes(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns a message for each side whose losses of the first steps differ from those of the first side."""
    expected = next(iter(losses.values()))
    return [
        f'{name} computes something else: losses {list(found)} instead of {list(expected)}'
        for name, found in losses.items()
        # The negated comparison also catches NaN.
        if not np.allclose(found, expected, rtol=TOLERANCE, atol=0)
    ]


def summarize(sides: Sequence[Side], task: Task, together: bool) -> dict[str, Any]:
    """Returns the measurements of one batch by side."""
    config = task.config
    tokens = config.train.global_batch_size * config.data.seq_len
    flops, results = training_flops(config.model, config.data.seq_len), {}
    peak = max((side.first['versions'].get('peak_tflops', 0) for side in sides), default=0) * 1e12
    for side in sides:
        seconds = statistics.median(side.seconds)
        results[side.name] = {
            'batch': task.sizes['batch'],
            'step_seconds': seconds,
            'turns': side.seconds,
            'steps_per_turn': side.steps,
            'tokens_per_second': tokens / seconds,
            'mfu_causal': tokens / seconds * flops.causal / peak if peak else None,
            'peak_memory_bytes': side.memory['peak'],
            **side.first,
            'memory': side.memory,
        }
    compared = {side.name: side.first['losses'] for side in sides if side.name not in OTHER_MODELS}
    return {
        'batch': task.sizes['batch'],
        'together': together,
        'mistakes': find_mistakes(compared),
        'sides': results,
        'peak_tflops': peak / 1e12,
    }


def main(argv: list[str]) -> int:
    """Measures and prints a table."""
    parser = ArgumentParser(prog='benchmarks.peers_gpu', allow_abbrev=False, description=__doc__)
    parser.add_argument('--size', choices=SIZES, default='1.3B', help='of the model (default 1.3B)')
    parser.add_argument('--batches', type=_numbers, default=[8, 16], help='sequences of a step (default 8,16)')
    parser.add_argument('--sides', help=f'of {", ".join(SIDES)} (default: those whose packages are installed)')
    parser.add_argument('--rounds', type=int, default=5, help='turns of each side (default 5)')
    parser.add_argument('--device', choices=('gpu', 'cpu'), default='gpu', help='cpu: for a trial, with --size=tiny')
    parser.add_argument('--compile', choices=MODES, default=MODES[0], help=f'of torch.compile (default {MODES[0]})')
    parser.add_argument('--nanochat', default='', metavar='DIR', help='directory that contains the package nanochat')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    names = _sides(options.sides, options.nanochat)
    sizes = SIZES[options.size]
    try:
        task = Task(sizes, options.device, options.compile, options.nanochat)
        result = sweep(names, task, options.batches, options.rounds)
    except SideError as error:
        print(f'error: {error}', file=sys.stderr)
        return EXIT_BAD_INPUT if error.code == EXIT_BAD_INPUT else EXIT_FAILED
    _print(result)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_FAILED if result['mistakes'] else EXIT_DONE


def _sides(chosen: str | None, nanochat: str) -> list[str]:
    installed = {name: importlib.util.find_spec(name) is not None for name in ('torch', 'transformers')}
    optional = {'transformers': installed['transformers'], 'nanochat': bool(nanochat)}
    default = ['maxlm', 'torch', *(name for name, is_present in optional.items() if is_present)]
    names = default if chosen is None else chosen.split(',')
    if not set(names) <= SIDES.keys():
        raise InputError(f'--sides={chosen}: there are {", ".join(SIDES)}')
    if names != ['maxlm'] and not installed['torch']:
        raise InputError('PyTorch is not installed here: pip install torch, or --sides=maxlm')
    if 'nanochat' in names and not nanochat:
        raise InputError('--sides: nanochat needs --nanochat=DIR, the directory that contains its package')
    return names


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(',')]


def _print(result: dict[str, Any]) -> None:
    print('| side | batch | step, ms | turns, ms | tokens/s | MFU, causal | memory, GiB | first loss | last compared |')
    print('|---|---:|---:|---:|---:|---:|---:|---:|---:|')
    sides = [(name, side) for batch in result['batches'] for name, side in batch['sides'].items()]
    for name, side in sides:
        turns = f'{min(side["turns"]) * 1e3:.1f}–{max(side["turns"]) * 1e3:.1f}'
        mfu = '' if side['mfu_causal'] is None else f'{side["mfu_causal"]:.1%}'
        memory = '' if side['peak_memory_bytes'] is None else f'{side["peak_memory_bytes"] / 2**30:.1f}'
        losses = f'{side["losses"][0]:.4f} | {side["losses"][-1]:.4f}'
        print(
            f'| {name} | {side["batch"]} | {side["step_seconds"] * 1e3:.1f} | {turns} | '
            f'{side["tokens_per_second"]:,.0f} | {mfu} | {memory} | {losses} |'
        )
    for name, side in result['sides'].items():
        settings = ', '.join(f'{key}={value}' for key, value in side['versions']['settings'].items())
        print(f'{name}: batch={side["batch"]}, {settings}')
    print(*result['mistakes'], sep='\n')
    if result['ratio'] is not None:
        print(f'tokens/s of {next(iter(result["sides"]))} / fastest other side: {result["ratio"]:.3f}')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
