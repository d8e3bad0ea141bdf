"""Compares dtypes of moments: trains configs/tiny.py with each `optimizer.moment_dtype` and several seeds.

    python -m benchmarks.moments --data=DIR [--seeds=2] [--steps=400] [--config.section.key=value …] [--output=FILE]

DIR is a data set of `maxlm prepare`, such as data/ of launch/demo.sh. Prints the final validation loss of each run, its
difference from float32 moments with the same seed, and the spread over seeds, which indicates the noise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.cli.runs import train
from maxlm.config.config_files import split_overrides
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.telemetry.metrics import read_metrics

CONFIG = Path(__file__).parent.parent / 'configs' / 'tiny.py'
MOMENTS = ('float32', 'bfloat16', 'int8')


def main(argv: list[str]) -> int:
    """Trains all runs, prints the comparison and writes JSON."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.moments', allow_abbrev=False, description=__doc__)
    parser.add_argument('--data', type=Path, required=True, help='data set to train on')
    parser.add_argument('--seeds', type=int, default=2, help='runs of each type (default 2)')
    parser.add_argument('--steps', type=int, default=400, help='steps of each run (default 400)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)

    losses: dict[str, list[float]] = {moments: [] for moments in MOMENTS}
    for seed in range(options.seeds):
        for moments, of_seeds in losses.items():
            loss = final_loss(options.data, overrides, moments=moments, seed=seed, steps=options.steps)
            of_seeds.append(loss)
            print(f'{moments} seed {seed}: {of_seeds[-1]:.5f}', flush=True)
    gaps = {
        moments: [loss / exact - 1 for loss, exact in zip(of_seeds, losses['float32'], strict=True)]
        for moments, of_seeds in losses.items()
    }
    spread = max(losses['float32']) / min(losses['float32']) - 1 if options.seeds > 1 else None
    for moments in MOMENTS[1:]:
        print(f'{moments}: {", ".join(f"{gap:+.3%}" for gap in gaps[moments])} against float32')
    if spread is not None:
        print(f'seeds of float32 are {spread:.3%} apart')
    result = {
        'steps': options.steps,
        'overrides': overrides,
        'validation_loss': losses,
        'gap': gaps,
        'seeds_apart': spread,
    }
    if options.output:
        options.output.write_text(json.dumps({'name': 'moments', **result, 'machine': machine()}, indent=1) + '\n')
    return EXIT_DONE


def final_loss(data: Path, more: list[str], *, moments: str, seed: int, steps: int) -> float:
    """Trains and returns the final validation loss in nats per token."""
    overrides = {
        'data.path': data.resolve(),
        'train.num_steps': steps,
        'train.seed': seed,
        'optimizer.moment_dtype': moments,
        'eval.interval': steps,
        'eval.num_batches': 0,
        'checkpoint.save_interval_steps': 0,
        'metrics.tensorboard': 'false',
        'metrics.peak_tflops': 1,
    }
    with tempfile.TemporaryDirectory() as workdir:
        words = [f'--config.{key}={value}' for key, value in overrides.items()]
        words += [f'--config.{override}' for override in more]
        assert train.main([f'--config={CONFIG}', f'--workdir={workdir}', *words]) == EXIT_DONE
        return next(line['eval/loss'] for line in read_metrics(Path(workdir)) if 'eval/loss' in line)


def run() -> None:
    """Entry point of `python -m benchmarks.moments`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
