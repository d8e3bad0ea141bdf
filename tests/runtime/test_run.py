"""How a process ends that ran a run."""

import signal
import subprocess
import sys

import pytest

from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED
from tests.conftest import ROOT

# A notice comes when all is done and JAX is taken down.
PROGRAM = """
import os, signal
from maxlm.runtime import run

run.part = lambda code: os.kill(os.getpid(), signal.SIGTERM)
run.start(lambda arguments, began: {code})
"""


# Control: a run that failed may be ended by a signal.
@pytest.mark.parametrize(
    ('code', 'ending'), [(EXIT_DONE, EXIT_DONE), (EXIT_PREEMPTED, EXIT_PREEMPTED), (1, -signal.SIGTERM)]
)
def test_a_late_notice_does_not_make_a_crash_of_it(code, ending):
    done = subprocess.run([sys.executable, '-c', PROGRAM.format(code=code)], cwd=ROOT, timeout=120)
    assert done.returncode == ending
