"""Processes that have launch/test.sh's compiler for GPUs; without it they are as on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from maxlm.planning.gpu_compiler import VARIABLE

ROOT = Path(__file__).parent.parent
# The folder that launch/test.sh installed it into; None = there is none.
FOLDER = os.environ.get(VARIABLE)


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS…` with the compiler, if it is there, and further environment variables."""
    environment = os.environ | ({VARIABLE: FOLDER} if FOLDER else {}) | variables
    # The flags of this process are for virtual CPU devices.
    del environment['XLA_FLAGS']
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
