"""launch/demo.sh, whole: a clean copy of the tree, a new virtual environment, real packages and real text.

Slow (about two minutes, most of it installing): that a new machine needs nothing else is what it is about.
"""

import json
import math
import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.fixture
def clean_copy(tmp_path):
    """The files that git tracks or would track, and nothing that a user's work has left."""
    command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard']
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def run(folder, *command):
    # As on a new machine: no virtual environment is active, no settings of the tests'.
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(('JAX_', 'XLA_', 'VIRTUAL_ENV', 'PYTHONPATH'))
    }
    # Nothing goes into the home of who tests.
    kept['JAX_COMPILATION_CACHE_DIR'] = ''
    # Compiling all modules of all packages at once takes longer than those that are used do at their first import.
    kept['PIP_NO_COMPILE'] = '1'
    kept['PATH'] = os.pathsep.join(part for part in kept['PATH'].split(os.pathsep) if '.venv' not in part)
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)


def test_demo_from_nothing(clean_copy):
    done = run(clean_copy, 'launch/demo.sh', '--steps', '12')
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clean_copy / '.venv/bin/maxlm').exists()
    facts = json.loads((clean_copy / 'data/dataset.json').read_text())
    assert facts['vocab_size'] == 4096
    assert facts['splits']['train']['tokens'] > 2_000_000
    lines = [json.loads(line) for line in (clean_copy / 'runs/tiny/metrics.jsonl').read_text().splitlines()]
    assert lines[-1]['step'] == 12
    assert lines[-1]['eval/loss'] < math.log(4096)
    out = done.stdout
    for words in ('def read_file(path):', 'import ', 'class Queue:', 'done: 12 steps', 'MFU', 'tokens/s', 'nats/token'):
        assert words in out
    assert 'unigram entropy' in out
    assert out.count('--- ') == 3
    assert 'wall time' in out
    assert 'runs/tiny/report.html' in out
    assert '<!doctype html>' in (clean_copy / 'runs/tiny/report.html').read_text()

    # Started again it installs nothing, keeps the data, finds the run finished and shows the same summary.
    again = run(clean_copy, 'launch/demo.sh', '--steps', '12')
    assert again.returncode == 0, again.stdout + again.stderr
    assert 'installing' not in again.stdout
    assert 'nothing to do' in again.stdout
    assert 'done: 12 steps' in again.stdout


def test_options_and_interpreters_that_cannot_be_used(clean_copy):
    for command in (['--steps'], ['--step', '3']):
        done = run(clean_copy, 'launch/demo.sh', *command)
        assert done.returncode == 2
        assert done.stderr.startswith('error: ')
        assert done.stderr.count('\n') == 1
    done = run(clean_copy, 'env', 'PYTHON=/bin/false', 'launch/demo.sh')
    assert done.returncode == 2
    assert 'Python 3.11' in done.stderr
    assert not (clean_copy / '.venv').exists()
