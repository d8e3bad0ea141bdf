"""Checkpoints that Orbax writes to a bucket: the same guarantees as on a disk, although a bucket has no rename."""

import json
import re

import pytest

from tests.faults import how_many, measured
from tests.forking import forking
from tests.gcs_emulator import running

pytestmark = [pytest.mark.multiprocess, pytest.mark.network_emulator]


@pytest.fixture(scope='module')
def emulator():
    with running('bucket') as emulator:
        yield emulator


@pytest.fixture(scope='module')
def parent(emulator):
    with forking('tests.checkpoint.bucket_checkpoints:main', devices=2, environment=emulator.environment) as parent:
        yield parent


@pytest.fixture
def run_scenario(parent, emulator, tmp_path):
    """Yields a function that runs a scenario of `bucket_checkpoints`. It returns the result and the printed lines."""

    def run_scenario(name, *numbers):
        process = parent.start([name, *numbers], tmp_path / 'output')
        assert process.wait() == 0, process.stdout + process.stderr
        *lines, last = process.stdout.splitlines()
        # In these scenarios gcsfs logs its own retries.
        assert name in ('damage', 'outage') or 'Traceback' not in process.stderr, process.stderr
        return json.loads(last), lines

    yield run_scenario
    emulator.clear()


def test_a_run_in_a_bucket(run_scenario):
    found, lines = run_scenario('complete_run')
    folder = 'gs://bucket/runs/complete_run/checkpoints'
    assert found['found'] == {
        '': f'{folder}/5',
        '@2': f'{folder}/2',
        '@best': f'{folder}/2',
        '/checkpoints/2': f'{folder}/2',
    }
    assert "step '1' does not exist; available steps: 2, 5" in found['missing']
    # The step is not listed after a kill at this point, so all listed steps can be restored.
    assert found['first_deleted'] == 'commit_success.txt'
    assert lines == []


def test_a_teacher_in_a_bucket(run_scenario):
    found, lines = run_scenario('teacher')
    assert found['layers'] == [2, 1]
    url = 'gs://bucket/runs/teacher'
    assert found['missing'] == f'distill.teacher={url}: {url}/config.json: No such file or directory'
    assert next(line for line in lines if 'distilling from the teacher' in line).endswith(f'{url}/checkpoints/2')


def test_refused_upload_is_reported_and_training_continues(run_scenario):
    found, lines = run_scenario('faults')
    assert found['messages'] == [
        'checkpoint of step 3 not saved: the bucket returned status 403; the newest checkpoint is step 2; '
        'training continues'
    ]
    assert found['steps'] == [3]
    assert lines == []


def test_unresponsive_bucket_is_reported_during_a_save(run_scenario, record_property):
    found, lines = run_scenario('outage', how_many(1, 0))
    status = how_many(403, 503)
    assert re.match(
        f'checkpoint of step 2 not saved( yet)?: the bucket returned status {status}; ', found['messages'][0]
    )
    assert found['newest'] == 1
    assert how_many(0, 1) or found['messages'][1:] == [
        'checkpoint of step 3 skipped: the previous checkpoint is still being written; training continues'
    ]
    assert lines == []
    if how_many(0, 1):
        # The default intervals are in use.
        measured(record_property, 'outage', f'alert after {found["seconds"]:.0f} s')


def test_transient_faults_delay_no_step(run_scenario, record_property):
    rounds, delay = how_many(1, 10), how_many(1, 20)
    found, lines = run_scenario('steady', rounds, delay)
    assert lines == []
    for kind, saves in found['saves'].items():
        assert len(saves) == rounds
        # Training steps ran during the saves.
        assert found['steps'][kind] > 10 * rounds
    # Requests were affected by the faults.
    assert min(found['saves']['delay']) > delay
    normal, slow = found['median'].pop('none'), max(found['median'].values())
    faults = f'503, 429, dropped connections, delays of {delay} s'
    figure = f'{4 * rounds} saves through {faults}: all committed'
    step_times = f'median step {1000 * slow:.1f} ms, without faults {1000 * normal:.1f} ms'
    measured(record_property, 'bucket-faults', f'{figure}; {step_times}')


def test_partially_deleted_step_is_not_listed(run_scenario):
    found, lines = run_scenario('half_deleted')
    assert found['visible'] == [1, 2]
    # Steps 1 and 2 have no commit marker, but their other objects remain.
    assert found['half'] == [3]
    assert min(found['left'].values()) > 3
    assert [count > 0 for count in found['after']] == [False, False, True]
    assert all('cannot be deleted yet' in line for line in lines), lines


def test_damaged_step_is_set_aside_and_outage_is_not_damage(run_scenario):
    found, lines = run_scenario('damage')
    assert 'Damaged' not in found['refused']
    assert '403' in found['refused']
    assert found['aside'] == ['2']
    assert found['kept'] > 3
    assert found['after'] == []
    assert len(lines) == 1
    assert 'checkpoint of step 2 is damaged and skipped' in lines[0]
    assert 'kept in gs://bucket/runs/damage/checkpoints/2; falling back to step 1' in lines[0]
