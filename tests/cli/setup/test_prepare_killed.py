"""`maxlm prepare` killed in each stage and at random times resumes and writes identical bytes."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.preparing import contents

pytestmark = pytest.mark.multiprocess


def kill(directory, *kills):
    """Returns the report of `tests.killing` after checking properties that hold for any number of kills."""
    command = [sys.executable, '-m', 'tests.killing', str(directory), '3', *kills]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report['groups'] > 4
    assert report['same']
    assert all(report['same'])
    # Negative controls: other options change the result, and cleaning removes documents.
    assert not report['other_is_same']
    removed = json.loads(contents(directory / 'uninterrupted')['cleaning.json'])['removed']
    assert removed.keys() >= {'c4: lorem ipsum', 'duplicate: exact', 'duplicate: near'}, removed.keys()
    return report


def test_a_kill_in_each_stage_leaves_the_same_bytes(tmp_path):
    # A stage may end between the check and the kill.
    assert sum(kill(tmp_path)['stages'].values()) == 4


@pytest.mark.nightly
def test_fifty_kills_leave_the_same_bytes(tmp_path):
    stages = kill(tmp_path, '50')['stages']
    assert sum(stages.values()) == 50
    # The times differ between machines, but always occur in more than one stage.
    assert len(stages.keys() & {'survey', 'decisions', 'tokenizer', 'shards'}) >= 2, stages
