"""Compares the loss of FP8 products with current and delayed scaling with bfloat16 on a CPU, which emulates FP8.

    python -m benchmarks.fp8_loss [--seeds=1] [--steps=200] [--output=FILE]

The model is that of configs/1b.py with width 64 and 4 layers. It trains on the bytes of this repository. The result of
a run is the mean loss of its last tenth. All runs of a seed have the same initial parameters and batches.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.step import machine, measure
from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, exit_code

CONFIG = Path(__file__).parent.parent / 'configs' / '1b.py'
SETTINGS = (
    'model.dim=64',
    'model.num_layers=4',
    'model.num_heads=2',
    'model.vocab_size=256',
    'model.scan_layers=true',
    'data.seq_len=64',
    'train.global_batch_size=16',
    'train.per_device_batch_size=8',
    'optimizer.learning_rate=3e-3',
    'optimizer.warmup_steps=20',
)
VARIANTS = {
    'bfloat16': (),
    'fp8, current scaling': ('model.matmul_precision=fp8',),
    'fp8, delayed scaling': ('model.matmul_precision=fp8', 'model.fp8_scaling=delayed'),
    'fp8, delayed scaling, head in fp8': (
        'model.matmul_precision=fp8',
        'model.fp8_scaling=delayed',
        'model.fp8_head=true',
    ),
}


def main(argv: list[str]) -> int:
    """Trains all runs, prints their losses and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.fp8_loss', allow_abbrev=False, description=__doc__)
    parser.add_argument('--seeds', type=int, default=1, help='runs of each variant (default 1)')
    parser.add_argument('--steps', type=int, default=200, help='steps of each run (default 200)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    runs = [run(variant, seed, options.steps) for seed in range(options.seeds) for variant in VARIANTS]
    baselines = {each['seed']: each['final_loss'] for each in runs if each['variant'] == 'bfloat16'}
    for each in runs:
        each['relative_difference'] = each['final_loss'] / baselines[each['seed']] - 1
        print(
            f'seed {each["seed"]}, {each["variant"]}: {each["final_loss"]:.4f}, {each["relative_difference"]:+.2%} '
            'compared with bfloat16'
        )
    if options.output:
        result = {'settings': SETTINGS, 'steps': options.steps, 'runs': runs, 'machine': machine()}
        options.output.write_text(json.dumps(result) + '\n')
    return EXIT_DONE


def run(variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Returns the losses of a run and the mean of the last tenth."""
    config = load(str(CONFIG), [*SETTINGS, *VARIANTS[variant], f'train.seed={seed}'])
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=config.model.vocab_size, windows=1)
    losses = measure(config, steps=steps, warmup=0, document=1000, tokens='text')['losses']
    return {'variant': variant, 'seed': seed, 'final_loss': statistics.fmean(losses[-steps // 10 :]), 'losses': losses}


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
