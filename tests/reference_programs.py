"""Reference figures of compiled training steps, which later programs must not exceed by a tenth.

    python -m tests.reference_programs

compiles the steps of REFERENCES with the installed versions and records their figures in reference_programs.json. Run
it after an intended change of the step. It needs the compilers for TPUs and GPUs that `launch/test.sh` installs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from maxlm.errors import EXIT_DONE
from tests.conftest import ROOT
from tests.gpu_compiler import run_python

FILE = Path(__file__).with_suffix('.json')
# The step of configs/1b.py with 32,768 tokens.
STEP_OF_1B = ('1b.py', 'h100:1', '--config.train.global_batch_size=16')
# On a slow machine, the TPU compiler needs minutes for a program of real size, but seconds for this one.
TINY = tuple(
    f'--config.{key}={value}' for key, value in {'model.num_layers': 2, 'model.dim': 64, 'data.seq_len': 64}.items()
)
TINY_ON_TPU = ('tiny.py', 'v5e:2x2', '--vocab-size=512', *TINY)
REFERENCES = (STEP_OF_1B, ('1b.py', 'h100:8'), TINY_ON_TPU)
MAX_GROWTH = 1.1


def words_of(config: str, target: str, *options: str) -> list[str]:
    """Returns the arguments of `maxlm plan` for a config of the repository."""
    return [f'--config={ROOT}/configs/{config}', f'--target={target}', '--json', *options]


def figures_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns the compared figures of a report: kernels, operations, and bytes of memory, traffic and transfers.

    Kernels and memory traffic are counted only in programs for GPUs.
    """
    figures = {
        'memory_bytes': report['memory']['total'],
        'flops': report['flops']['compiled'],
        'transferred_bytes': sum(transfer['size'] * transfer['count'] for transfer in report['transfers']),
    }
    if 'kernels' in report:
        figures |= {'traffic_bytes': report['traffic'], 'kernels': report['kernels']}
    return {name: float(f'{value:.4g}') for name, value in figures.items()}


def recorded(version: str = jax.__version__) -> dict[str, dict[str, float]]:
    """Returns the figures by case, recorded with this version of JAX, or else with the newest one in the file."""
    records = json.loads(FILE.read_text())
    newest = max(records, key=lambda name: tuple(map(int, name.split('.'))))
    return records.get(_minor(version), records[newest])


def growth(case: tuple[str, ...], report: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the recorded and the new value of each figure of a report that has grown by more than a tenth."""
    before = recorded()[' '.join(case)]
    now = figures_of(report)
    assert now.keys() == before.keys()
    return {name: (before[name], now[name]) for name in now if now[name] > MAX_GROWTH * before[name]}


def _minor(version: str) -> str:
    return '.'.join(version.split('.')[:2])


def main() -> int:
    """Compiles all cases and writes the file; records of other versions of JAX stay."""
    records = json.loads(FILE.read_text()) if FILE.exists() else {}
    figures = {}
    for case in REFERENCES:
        done = run_python('-m', 'maxlm.plan', *words_of(*case))
        if done.returncode != EXIT_DONE:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        figures[' '.join(case)] = figures_of(json.loads(done.stdout))
    records[_minor(jax.__version__)] = figures
    FILE.write_text(json.dumps(records, indent=2, sort_keys=True) + '\n')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(main())
