"""Kills during saves: committed checkpoints are never lost, and all visible ones can be restored."""

import json

import pytest

from tests.faults import how_many, measured
from tests.forking import forking
from tests.gcs_emulator import running

pytestmark = [pytest.mark.multiprocess, pytest.mark.network_emulator]


@pytest.fixture(scope='module')
def parent():
    with running('bucket') as emulator, forking('tests.killing_saves:main', environment=emulator.environment) as parent:
        yield parent


@pytest.mark.parametrize('place', ['disk', pytest.param('bucket', marks=pytest.mark.nightly)])
def test_kills_while_saving(parent, tmp_path, record_property, place):
    kills = how_many(5, 200) if place == 'disk' else how_many(3, 100)
    workdir = 'gs://bucket/runs/one' if place == 'bucket' else tmp_path / 'run'
    process = parent.start([workdir, 0, kills], tmp_path / 'output')
    assert process.wait() == 0, process.stdout[-3000:] + process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert (report['lost'], report['bad']) == ([], [])
    assert sum(report['interrupted'].values()) == kills
    # Kills between two saves do not test anything.
    assert report['interrupted'].get('between', 0) < kills
    assert report['committed'] > 4
    operations = ', '.join(
        f'{count} while {name}' for name, count in sorted(report['interrupted'].items()) if name != 'between'
    )
    where = 'on a disk' if place == 'disk' else "in the emulator's bucket"
    measured(
        record_property, 'kill-save', f'{kills} kills {where} ({operations}): committed steps lost: 0; damaged steps: 0'
    )
