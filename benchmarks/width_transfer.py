"""Shows how the best learning rate changes with the width: trains models of several widths with several rates.

    python -m benchmarks.width_transfer [--steps=150] [--batch=16] [--rates 2e-3 4e-3 …]
        [--output=FILE]

The models have four layers, heads of 32 and float32; they train on the bytes of this repository. Each width is trained
with and without `model.base_dim=64`. Prints the mean loss of the last 20 steps of each run.
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

CONFIG = Path(__file__).parent.parent / 'configs' / 'tiny.py'
BASE_DIM, HEAD_DIM, LAST = 64, 32, 20
WIDTHS = (64, 128, 256)
RATES = tuple(2.0**-exponent for exponent in (10, 9, 8, 7, 6, 5, 4))
SETTINGS = (
    'model.family=llama',
    'model.num_layers=4',
    f'model.head_dim={HEAD_DIM}',
    'model.num_kv_heads=0',
    'model.tie_embeddings=false',
    'model.vocab_size=256',
    'model.dtype=float32',
    'data.seq_len=128',
    'optimizer.schedule=linear',
    'optimizer.min_learning_rate=0',
    'optimizer.warmup_steps=20',
    'optimizer.warmup_from_zero=true',
    'guard.spike_window=0',
)


def main(argv: list[str]) -> int:
    """Trains all runs, prints their losses and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.width_transfer', allow_abbrev=False, description=__doc__)
    parser.add_argument('--steps', type=int, default=150, help='steps of each run (default 150)')
    parser.add_argument('--batch', type=int, default=16, help='sequences of 128 tokens per step (default 16)')
    parser.add_argument('--rates', nargs='+', type=float, default=RATES, help='learning rates (default 2^-10 to 2^-4)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    for base_dim in (0, BASE_DIM):
        for width in WIDTHS:
            # At the base width, the transfer changes nothing.
            is_known = base_dim == width
            for rate in options.rates:
                known = [each for each in runs if is_known and (each['width'], each['rate']) == (width, rate)]
                loss = known[0]['loss'] if known else train(width, base_dim, rate, options.steps, options.batch)
                runs.append({'width': width, 'base_dim': base_dim, 'rate': rate, 'loss': loss})
                print(f'width {width}, model.base_dim={base_dim}, learning rate {rate:.5f}: {loss:.4f}', flush=True)
    if options.output:
        result = {
            'settings': SETTINGS,
            'steps': options.steps,
            'batch': options.batch,
            'runs': runs,
            'machine': machine(),
        }
        options.output.write_text(json.dumps(result) + '\n')
    return EXIT_DONE


def train(width: int, base_dim: int, rate: float, steps: int, batch: int) -> float:
    """Returns the mean loss of the last steps of a run."""
    sizes = {'model.dim': width, 'model.num_heads': width // HEAD_DIM, 'model.ffn_dim': 3 * width}
    run: dict[str, Any] = {
        **sizes,
        'model.base_dim': base_dim,
        'optimizer.learning_rate': rate,
        'train.num_steps': steps,
        'train.global_batch_size': batch,
        'train.per_device_batch_size': batch,
    }
    config = load(str(CONFIG), [*SETTINGS, *(f'{key}={value}' for key, value in run.items())])
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=config.model.vocab_size, windows=1)
    result = measure(config, steps=steps, warmup=0, document=1000, tokens='text')
    return statistics.fmean(result['losses'][-LAST:])


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
