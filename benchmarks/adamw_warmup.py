"""Shows the loss spikes of AdamW after a short warm-up: trains a narrow model for few steps with several warm-ups.

    python -m benchmarks.adamw_warmup [--seeds=1] [--steps=45] [--output=FILE]

The model is that of configs/1b.py in float32 with width 128. It trains on the bytes of this repository, with the guard
disabled. Prints the spikes of each run, as defined in benchmarks/step.py.

The learning rate was chosen because it shows the effect. In single runs of similar models, a warm-up of 5 steps had no
spike with 3e-4, 1e-3, 2e-3 and 3e-3. With 3.6e-3, warm-ups of 5 and of 35 steps both had one. The seeds with spikes
change with the text of the repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.step import RECORDED, machine, measure, spikes
from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_DONE, exit_code

CONFIG = Path(__file__).parent.parent / 'configs' / '1b.py'
WARMUPS = (5, 35)
SETTINGS = (
    'model.dim=128',
    'model.num_heads=2',
    'model.vocab_size=256',
    'model.dtype=float32',
    'model.scan_layers=true',
    'data.seq_len=128',
    'train.global_batch_size=16',
    'train.per_device_batch_size=16',
    'optimizer.learning_rate=1.5e-3',
    'optimizer.min_learning_rate=1e-5',
    'guard.spike_window=0',
)


def main(argv: list[str]) -> int:
    """Trains all runs, prints their spikes and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.adamw_warmup', allow_abbrev=False, description=__doc__)
    parser.add_argument('--seeds', type=int, default=1, help='runs with each warm-up (default 1)')
    parser.add_argument('--steps', type=int, default=45, help='steps of each run (default 45)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    runs = [run(warmup, seed, options.steps) for warmup in WARMUPS for seed in range(options.seeds)]
    for each in runs:
        losses = '  '.join(f'{each["losses"][step]:.2f} at step {step}' for step in each['spikes'])
        print(f'warm-up {each["warmup_steps"]} steps, seed {each["seed"]}: {losses or "no spike"}')
    if options.output:
        result = {'settings': SETTINGS, 'steps': options.steps, 'runs': runs, 'machine': machine()}
        options.output.write_text(json.dumps(result) + '\n')
    return EXIT_DONE


def run(warmup: int, seed: int, steps: int) -> dict[str, Any]:
    """Returns the metrics of each step of a run, and its spikes."""
    config = load(str(CONFIG), [*SETTINGS, f'optimizer.warmup_steps={warmup}', f'train.seed={seed}'])
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=config.model.vocab_size, windows=1)
    result = measure(config, steps=steps, warmup=0, document=1000, tokens='text')
    recorded = {key: result[key] for key in RECORDED.values()}
    return {'warmup_steps': warmup, 'seed': seed, 'spikes': list(spikes(recorded['losses'])), **recorded}


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
