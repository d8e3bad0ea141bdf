"""The golden run: configs/tiny.py as it stands, on the bundled text, 100 steps of 8 × 128 tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from maxlm.runtime.metrics import read_metrics
from tests.cpu import fast_environment

FILE = Path(__file__).parent / 'tiny.json'
ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / 'configs' / 'tiny.py'


def golden_run(dataset: Path, workdir: Path, *, seed: int = 0, num_steps: int = 100) -> dict[str, float]:
    """Name and step → loss, for training and evaluation."""
    overrides = {
        'data.path': dataset,
        'data.window': 128,
        'train.num_steps': num_steps,
        'train.seed': seed,
        'metrics.tensorboard': 'false',
        'metrics.peak_tflops': 1,
        'checkpoint.every_steps': 0,
    }
    command = [f'--config={CONFIG}', f'--workdir={workdir}']
    command += [f'--config.{key}={value}' for key, value in overrides.items()]
    subprocess.run([sys.executable, '-m', 'maxlm.train', *command], check=True, cwd=ROOT, env=fast_environment())
    return {
        f'{name} {line["step"]}': round(line[name], 6)
        for line in read_metrics(workdir)
        for name in ('train/loss', 'eval/loss')
        if name in line
    }
