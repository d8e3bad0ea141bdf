"""Tests that all descendants of a process are killed, even if they change parents meanwhile."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

# A child with a child. Before the children of the first are read, it dies, so its child changes its parent.
PROGRAM = """
import os, signal, sys, time
from maxlm.sandbox import process_tree, syscalls

class Changing(process_tree.ProcessTree):
    def children(self, number):
        if armed and number == str(middle):
            os.kill(middle, signal.SIGKILL)
            os.waitid(os.P_PID, middle, os.WEXITED | os.WNOWAIT)
        return super().children(number)

armed = False
syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, 'prctl')
reader, writer = os.pipe()
middle = os.fork()
if not middle:
    os.close(1)
    below = os.fork()
    if below:
        os.write(writer, str(below).encode())
    time.sleep(60)
    os._exit(0)
print(os.read(reader, 20).decode(), flush=True)
tree = Changing()
armed = True
if sys.argv[1] == 'look':
    print(len(tree.live_descendants()))
else:
    tree.kill_all()
"""


@pytest.mark.parametrize('way', ['kill_all', 'look'])
def test_processes_that_change_parents_are_killed(way):
    number, *seen = run(PROGRAM, way).split()
    if way == 'kill_all':
        assert not psutil.pid_exists(int(number))
    else:
        # A single read of the tree misses the process.
        assert seen == ['0']
        assert psutil.Process(int(number)).status() == psutil.STATUS_SLEEPING
        os.kill(int(number), signal.SIGKILL)


def test_an_excluded_process_is_not_killed():
    program = """
import os, subprocess
from maxlm.sandbox.process_tree import ProcessTree
one, other = (subprocess.Popen(['sleep', '60']) for _ in range(2))
ProcessTree().kill_all(exclude=str(one.pid))
print(os.path.exists(f'/proc/{one.pid}'), os.path.exists(f'/proc/{other.pid}'))
one.kill()
"""
    assert run(program).split() == ['True', 'False']


def run(program, *arguments):
    """Returns the output of a program that can import the package."""
    command = [sys.executable, '-c', program, *arguments]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True, timeout=60).stdout
