"""kill -9 of `prepare` at fifty moments. Slow, three quarters of a minute: each run is a real one with processes."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT
from tests.preparing import contents


def test_fifty_kills_leave_the_same_bytes(tmp_path):
    command = [sys.executable, '-m', 'tests.killing', str(tmp_path), '3', '50']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    stages = report['stages']
    assert sum(stages.values()) == 50
    # Moments differ from machine to machine; on all of them they are in more than one stage of the work.
    assert len(stages.keys() & {'survey', 'verdicts', 'tokenizer', 'shards'}) >= 2, stages
    assert report['groups'] > 4
    assert len(report['same']) >= 1
    assert all(report['same'])
    # Controls: other options would have been seen, and there was something to clean.
    assert not report['other_is_same']
    removed = json.loads(contents(tmp_path / 'whole')['cleaning.json'])['removed']
    assert removed.keys() >= {'c4: lorem ipsum', 'duplicate: exact', 'duplicate: near'}, removed.keys()
