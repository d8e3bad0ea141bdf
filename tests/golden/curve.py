"""Golden runs: configs/tiny.py on the bundled text, unchanged and with a smaller model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.cli.runs import train
from maxlm.errors import EXIT_DONE
from maxlm.telemetry.metrics import read_metrics
from tests.cpu import fast_environment

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / 'configs' / 'tiny.py'
QUIET = {
    'metrics.tensorboard': 'false',
    'metrics.device_stats_interval_seconds': 0,
    'metrics.peak_tflops': 1,
    'checkpoint.save_interval_steps': 0,
}


class Golden(NamedTuple):
    """A run and the file of its losses.

    Attributes:
        file: JSON file with the losses.
        settings: config overrides.
        is_fast: True for one device in a separate process with full XLA optimization; otherwise this process and all
            its devices run it.
    """

    file: Path
    settings: Mapping[str, Any]
    is_fast: bool


# 100 steps of 8 × 128 tokens, which take minutes.
FULL = Golden(Path(__file__).parent / 'tiny.json', {'data.seq_len': 128, 'train.num_steps': 100}, True)
# 30 steps of 8 × 32 tokens, which take seconds.
SHORT = Golden(
    Path(__file__).parent / 'short.json',
    {
        'model.num_layers': 2,
        'model.dim': 32,
        'model.num_heads': 2,
        'model.ffn_dim': 96,
        'data.seq_len': 32,
        'train.num_steps': 30,
        'train.log_every': 5,
        'eval.num_batches': 4,
        'eval.num_samples': 0,
        'optimizer.warmup_steps': 5,
    },
    False,
)


def golden_run(golden: Golden, dataset: Path, workdir: Path, **overrides: Any) -> dict[str, float]:
    """Returns training and evaluation losses by name and step; overrides have the form `train__seed=1`."""
    settings = {'data.path': dataset, **QUIET, **golden.settings}
    settings |= {name.replace('__', '.'): value for name, value in overrides.items()}
    command = [f'--config={CONFIG}', f'--workdir={workdir}']
    command += [f'--config.{key}={value}' for key, value in settings.items()]
    if golden.is_fast:
        subprocess.run([sys.executable, '-m', 'maxlm.train', *command], check=True, cwd=ROOT, env=fast_environment())
    else:
        assert train.main(command) == EXIT_DONE
    return {
        f'{name} {line["step"]}': round(line[name], 6)
        for line in read_metrics(workdir)
        for name in ('train/loss', 'eval/loss')
        if name in line
    }
