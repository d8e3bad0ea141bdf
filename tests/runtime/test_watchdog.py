"""A run that stands still is ended, with all stacks; one that goes on, waits for another or is in a phase is not."""

import subprocess
import sys

import pytest

from maxlm.errors import EXIT_PREEMPTED
from tests.processes import ROOT

# The end of a process is seen from outside only. `others` says whether all other processes wait too.
PROGRAM = """
import sys, time
from pathlib import Path
from maxlm.runtime.watchdog import Watchdog

class Peers:
    all_overdue = {others}
    def set_overdue(self, yes):
        pass
    def leave(self, code, reason):
        import os
        sys.stderr.flush()
        os._exit(code)

def stand_still():
    time.sleep({seconds})

with Watchdog({limit}, Peers(), Path(sys.argv[1])) as watchdog:
    {begin}
    {body}
print('went on')
"""


def run(tmp_path, body, *, limit=0.3, seconds=30, others=True, begin='watchdog.start()'):
    program = PROGRAM.format(begin=begin, body=body, limit=limit, seconds=seconds, others=others)
    command = [sys.executable, '-c', program, str(tmp_path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize('body', ['stand_still()', 'with watchdog.waiting(): stand_still()'])
def test_a_process_that_stands_still_tells_where_and_ends(tmp_path, body):
    result = run(tmp_path, body)
    assert result.returncode == EXIT_PREEMPTED
    for text in (result.stderr, (tmp_path / 'run.log').read_text()):
        assert 'stuck: no step for 0.3 s (train.stuck_seconds)' in text
        assert 'in stand_still' in text


@pytest.mark.parametrize(
    ('body', 'options'),
    [
        ('with watchdog.phase(): stand_still()', {}),
        # Another process is at fault, and will tell.
        ('with watchdog.waiting(): stand_still()', {'others': False}),
        # What it waited for came: then it has the whole time again.
        ('with watchdog.waiting(): stand_still()\n    time.sleep(0.15)', {'others': False}),
        ('[(time.sleep(0.02), watchdog.step_done()) for _ in range(100)]', {'limit': 1}),
        ('stand_still()', {'limit': 0}),
        ('stand_still()', {'begin': 'watchdog.start(); watchdog.finish()'}),
    ],
)
def test_a_process_that_has_a_reason_is_left_alone(tmp_path, body, options):
    result = run(tmp_path, body, seconds=2, **options)
    assert (result.returncode, result.stdout, result.stderr) == (0, 'went on\n', '')
