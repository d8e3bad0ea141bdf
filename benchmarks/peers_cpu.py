"""Compares the training step on a CPU with PyTorch: `python -m benchmarks.peers_cpu [--threads=1,2] [--output=FILE]`.

GPT-2s of three sizes are trained by maxlm, by a plain PyTorch GPT and by Transformers' GPT-2, eager and with
`torch.compile`. All sides have the same weights, tokens, optimizer and threads, and use float32. Each side is a process
that idles while another one works. The sides run in turns in a changing order; ratios compare medians over all turns.
The losses of the first three steps are compared before. The peak is the throughput of a large matrix product on the
same threads. Needs maxlm's `dev` extra and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_worker import PEERS, make_config
from benchmarks.step import machine
from maxlm.errors import EXIT_DONE, ArgumentParser, exit_code
from maxlm.log import progress_bar
from maxlm.training.flops import training_flops

SIZES = {
    '0.8M': {'num_layers': 4, 'dim': 128, 'num_heads': 4, 'window': 64, 'batch': 12, 'vocab_size': 65},
    '10M': {'num_layers': 6, 'dim': 384, 'num_heads': 6, 'window': 256, 'batch': 8, 'vocab_size': 65},
    '30M': {'num_layers': 8, 'dim': 512, 'num_heads': 8, 'window': 512, 'batch': 4, 'vocab_size': 4096},
}
# Duration of a turn in seconds.
TURN_SECONDS = 2.0
# Relative difference of losses; different orders of additions cause rounding errors.
TOLERANCE = 1e-4


class Side:
    """Process of one side for one size."""

    def __init__(self, peer: str, sizes: dict[str, int], threads: int):
        command = [sys.executable, '-m', 'benchmarks.peer_worker', peer, json.dumps(sizes), str(threads)]
        self.peer = peer
        self.seconds: list[float] = []
        environment = {**os.environ, 'OMP_NUM_THREADS': str(threads), 'JAX_PLATFORMS': 'cpu'}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.losses: list[float] = self._answer()
        self.work(1)
        # Number of steps per turn.
        self.steps = max(1, round(TURN_SECONDS / min(self.work(3))))

    def work(self, steps: int) -> list[float]:
        """Runs steps and returns the seconds of each."""
        assert self._process.stdin
        print(steps, file=self._process.stdin, flush=True)
        seconds: list[float] = self._answer()
        return seconds

    def end(self) -> None:
        """Ends the process."""
        # communicate() waits for the process and closes its pipes.
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f'{self.peer} ended with {self._process.wait()}')
        return json.loads(line)


def measure(sizes: dict[str, int], threads: int, rounds: int, advance: Any) -> dict[str, Any]:
    """Measures all sides on one size in turns."""
    sides = [Side(peer, sizes, threads) for peer in PEERS]
    peaks = [product_rate(threads)]
    try:
        for side in sides:
            if not np.allclose(side.losses, sides[0].losses, rtol=TOLERANCE):
                raise SystemExit(f'{side.peer} computes something else: {side.losses}, {sides[0].losses}')
        order = random.Random(0)
        for _ in range(rounds):
            for side in order.sample(sides, len(sides)):
                side.seconds += side.work(side.steps)
            advance()
    finally:
        for side in sides:
            side.end()
    peaks.append(product_rate(threads))
    medians = {side.peer: statistics.median(side.seconds) for side in sides}
    config = make_config(sizes)
    tokens = config.train.global_batch_size * config.data.seq_len
    fastest = min(value for peer, value in medians.items() if peer != 'maxlm')
    tflops = training_flops(config.model, config.data.seq_len).causal * tokens / medians['maxlm'] / 1e12
    return {
        'threads': threads,
        'seconds': medians,
        'spread': {side.peer: np.quantile(side.seconds, [0.1, 0.9]).tolist() for side in sides},
        'steps': {side.peer: len(side.seconds) for side in sides},
        'losses': {side.peer: side.losses for side in sides},
        'ratio': fastest / medians['maxlm'],
        'tflops': tflops,
        'share_of_peak': tflops / max(peaks),
    }


def product_rate(threads: int) -> float:
    """Returns the TFLOP/s of a large matrix product on a number of threads, measured in a separate process."""
    command = [sys.executable, '-m', 'benchmarks.product_rate', str(threads)]
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout)


def main(argv: list[str]) -> int:
    """Measures and prints a table."""
    parser = ArgumentParser(prog='benchmarks.peers_cpu', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--sizes', default=','.join(SIZES), help='of the models (default: all)')
    parser.add_argument('--threads', default='1,2', help='numbers of threads (default 1,2)')
    parser.add_argument('--rounds', type=int, default=7, help='turns of each side (default 7)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    names, threads = options.sizes.split(','), [int(word) for word in options.threads.split(',')]
    results = []
    with progress_bar('benchmark', total=len(names) * len(threads) * options.rounds, unit='round', show=True) as bar:
        for name in names:
            for number in threads:
                results.append({'size': name, **measure(SIZES[name], number, options.rounds, bar.update)})
    sides = ' | '.join(f'{peer}, ms' for peer in PEERS)
    print(f'| size | threads | {sides} | fastest peer / maxlm | share of peak |')
    print('|---|---:|' + '---:|' * (len(PEERS) + 2))
    for result in results:
        times = ' | '.join(f'{result["seconds"][peer] * 1e3:.1f}' for peer in PEERS)
        ratio, share = f'{result["ratio"]:.2f}', f'{result["share_of_peak"]:.0%}'
        print(f'| {result["size"]} | {result["threads"]} | {times} | {ratio} | {share} |')
    if options.output:
        versions = {package: version(package) for package in ('torch', 'transformers')}
        report = {'results': results, 'machine': {**machine(), **versions}}
        options.output.write_text(json.dumps(report, indent=1) + '\n')
    print(f'worst ratio: {min(result["ratio"] for result in results):.2f}')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
