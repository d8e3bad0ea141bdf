"""A kill at any moment of a save takes no step that was committed, and what shows then can be restored."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.faults import how_many, measured
from tests.gcs_emulator import running


@pytest.fixture
def kill(tmp_path):
    """What `killing_saves` found."""

    def kill(workdir, kills, environment):
        environment = {
            **os.environ,
            **environment,
            'XLA_FLAGS': cpu_flags(1),
            'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'programs'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        command = [sys.executable, '-m', 'tests.killing_saves', workdir, '0', str(kills)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return kill


@pytest.mark.parametrize('place', ['disk', 'bucket'])
def test_kills_while_saving(kill, tmp_path, record_property, place):
    kills = how_many(5, 200) if place == 'disk' else how_many(3, 100)
    with running('bucket') if place == 'bucket' else contextlib.nullcontext() as emulator:
        workdir = 'gs://bucket/runs/one' if emulator else str(tmp_path / 'run')
        report = kill(workdir, kills, emulator.environment if emulator else {})
    assert (report['lost'], report['bad']) == ([], [])
    assert sum(report['met'].values()) == kills
    # Kills between two saves would show nothing.
    assert report['met'].get('between', 0) < kills
    assert report['committed'] > 4
    met = ', '.join(f'{count} while {what}' for what, count in sorted(report['met'].items()) if what != 'between')
    where = 'on a disk' if place == 'disk' else "in the emulator's bucket"
    measured(record_property, 'kill-save', f'{kills} kills {where} ({met}): committed steps lost: 0; damaged ones: 0')
