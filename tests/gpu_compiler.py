"""Processes that have launch/test.sh's compiler for GPUs; without it they are as on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The folder that launch/test.sh installed it into; None = there is none.
FOLDER = os.environ.get('MAXLM_GPU_COMPILER')


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS…` with the compiler, if it is there."""
    environment = dict(os.environ)
    if FOLDER:
        nvcc = f'{FOLDER}/nvidia/cuda_nvcc'
        environment |= {
            'PYTHONPATH': os.pathsep.join([FOLDER, str(ROOT)]),
            'PATH': os.pathsep.join([f'{nvcc}/bin', environment['PATH']]),
            'XLA_FLAGS': f'--xla_gpu_cuda_data_dir={nvcc}',
        }
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
