"""Processes with the GPU compiler that launch/test.sh installs, if it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxlm.planning.gpu_compiler import VARIABLE

ROOT = Path(__file__).parent.parent
# Directory of the GPU compiler; None if launch/test.sh has not installed it.
FOLDER = os.environ.get(VARIABLE)


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS…` with the GPU compiler, if installed, and additional environment variables."""
    environment = os.environ | ({VARIABLE: FOLDER} if FOLDER else {}) | variables
    # XLA_FLAGS of this process are for virtual CPU devices.
    del environment['XLA_FLAGS']
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def needs_gpu_compiler(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that compiles for GPUs in another process."""
    skip = pytest.mark.skipif(not FOLDER, reason=f'needs the compiler for GPUs: run launch/test.sh, or set {VARIABLE}')
    return pytest.mark.gpu(pytest.mark.multiprocess(skip(test)))
