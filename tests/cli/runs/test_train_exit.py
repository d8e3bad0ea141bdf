"""Tests the exit of a training process."""

import json
import signal
import subprocess
import sys

import pytest

from maxlm.errors import EXIT_DONE, EXIT_PREEMPTED
from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

# A preemption notice arrives while JAX shuts down after the run. Each exit code is that of a forked process.
PROGRAM = """
import json, os, signal, sys
from maxlm.cli.runs import train
from maxlm.runtime import heartbeat

heartbeat.disconnect = lambda code: os.kill(os.getpid(), signal.SIGTERM)
codes = []
for code in map(int, sys.argv[1:]):
    if not (pid := os.fork()):
        train.main = lambda arguments, began: code
        train.run('train')
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


def test_late_preemption_notice_keeps_the_exit_code():
    # Negative control: a signal may end a failed run.
    expected = {EXIT_DONE: EXIT_DONE, EXIT_PREEMPTED: EXIT_PREEMPTED, 1: -signal.SIGTERM}
    command = [sys.executable, '-c', PROGRAM, *map(str, expected)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == list(expected.values())
