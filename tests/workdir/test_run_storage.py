"""Tests the remote storage of a run: flags, a known machine and a new machine."""

import json
import os
import subprocess
import sys

import pytest

from maxlm.errors import InputError
from maxlm.workdir.bucket_steps import complete_steps
from maxlm.workdir.run_storage import RunStorage, cache_directory, open_run_storage
from tests.conftest import ROOT
from tests.gcs_emulator import WireFault, running
from tests.workdir.steps import content, write_step

URL = 'gs://bucket/runs/one'
FAST = {'poll_seconds': 0.01, 'files_seconds': 0.0}


def run_attempt(workdir, url, *steps, line=''):
    """Runs an attempt: it downloads, writes checkpoints, and writes a line for each."""
    storage = RunStorage(workdir, url, **FAST)
    storage.fetch()
    workdir.mkdir(parents=True, exist_ok=True)
    with storage:
        for step in steps:
            write_step(workdir, step, line)
            with (workdir / 'metrics.jsonl').open('a') as file:
                file.write(json.dumps({'step': step, 'line': line}) + '\n')
        (workdir / 'config.json').write_text(json.dumps({'last': line}))
    return storage


def lines(workdir):
    return [json.loads(line)['step'] for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_run_resumes_on_an_empty_machine(url, tmp_path):
    run_attempt(tmp_path / 'a', url, 1, 2)
    storage = RunStorage(tmp_path / 'b', url)
    storage.fetch()
    assert {*os.listdir(tmp_path / 'b' / 'checkpoints')} == {'2'}
    assert content(tmp_path / 'b' / 'checkpoints' / '2') == content(tmp_path / 'a' / 'checkpoints' / '2')
    assert lines(tmp_path / 'b') == [1, 2]
    # The step came from the bucket, so no upload is needed.
    assert storage.is_uploaded(2)
    run_attempt(tmp_path / 'b', url, 3)
    assert lines(tmp_path / 'b') == [1, 2, 3]
    assert storage.remote_steps() == [1, 2, 3]
    # Back on the first machine, local files are outdated.
    run_attempt(tmp_path / 'a', url, 4)
    assert lines(tmp_path / 'a') == [1, 2, 3, 4]
    assert {*os.listdir(tmp_path / 'a' / 'checkpoints')} == {'1', '2', '3', '4'}
    assert storage.remote_steps() == [1, 2, 3, 4]


def test_killed_run_keeps_local_files(url, tmp_path):
    run_attempt(tmp_path, url, 1)
    # This step is not uploaded yet.
    write_step(tmp_path, 2)
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 2}\n')
    storage = RunStorage(tmp_path, url)
    storage.fetch()
    assert lines(tmp_path) == [1, 2]
    assert not (tmp_path / 'metrics.jsonl.replaced').exists()
    assert {*os.listdir(tmp_path / 'checkpoints')} == {'1', '2'}
    assert not storage.is_uploaded(2)
    run_attempt(tmp_path, url, 3)
    assert storage.remote_steps() == [1, 2, 3]


def test_replaced_local_files_are_kept(url, tmp_path):
    run_attempt(tmp_path / 'a', url, 1)
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b' / 'metrics.jsonl').write_text('{"step": 99}\n')
    RunStorage(tmp_path / 'b', url).fetch()
    assert lines(tmp_path / 'b') == [1]
    assert (tmp_path / 'b' / 'metrics.jsonl.replaced').read_text() == '{"step": 99}\n'


def test_steps_missing_from_the_bucket_are_uploaded_again(bucket, url, tmp_path):
    run_attempt(tmp_path, url, 1, 2)
    bucket.delete(['checkpoints/1/commit_success.txt'])
    assert complete_steps(bucket) == [2]
    run_attempt(tmp_path, url, 3)
    assert complete_steps(bucket) == [1, 2, 3]


def test_damaged_step_is_downloaded_again(bucket, url, tmp_path):
    storage = run_attempt(tmp_path, url, 1)
    folder = tmp_path / 'checkpoints' / '1'
    expected = content(folder)
    (folder / 'progress' / 'metadata').write_bytes(b'garbled')
    storage.fetch_step(1)
    assert content(folder) == expected
    assert storage.is_uploaded(1)


def test_outage_at_the_start_does_not_start_a_new_run(gcs, tmp_path, log):
    run_attempt(tmp_path / 'a', URL, 1)
    gcs.vanish()
    with pytest.raises(
        InputError,
        match=r'gs://bucket/runs/one/checkpoints: no answer .*run the command again when the bucket responds',
    ):
        RunStorage(tmp_path / 'b', URL).fetch(timeout_seconds=0.0)
    assert not (tmp_path / 'b' / 'checkpoints').exists()
    gcs.appear()
    gcs.wire_faults.append(WireFault(status=503, times=12))
    RunStorage(tmp_path / 'b', URL).fetch(timeout_seconds=100.0)
    assert lines(tmp_path / 'b') == [1]
    assert [line for line in log() if 'retrying in' in line]


def test_refused_access_at_the_start_is_reported_immediately(gcs, tmp_path):
    gcs.wire_faults.append(WireFault(status=403))
    with pytest.raises(InputError, match=r'refused .*check the bucket and its region, the credentials'):
        RunStorage(tmp_path, URL).fetch()


@pytest.mark.parametrize(('kind', 'advice'), [('gs', 'check the bucket and'), ('s3', 'does not exist')])
def test_missing_bucket(kind, advice, tmp_path, request):
    request.getfixturevalue('gcs' if kind == 'gs' else 's3')
    with pytest.raises(InputError, match=rf'{kind}://nobody/run/checkpoints: refused .*{advice}'):
        RunStorage(tmp_path, f'{kind}://nobody/run').fetch(timeout_seconds=0.0)
    assert list(tmp_path.iterdir()) == []


def test_flags(tmp_path, gcs):
    cache = str(tmp_path / 'cache')
    plain = open_run_storage(str(tmp_path / 'run'))
    assert (plain.workdir, str(plain.checkpoint_directory)) == (tmp_path / 'run', str(tmp_path / 'run' / 'checkpoints'))
    assert not plain.is_uploaded(1)
    with plain:
        plain.fetch()
    assert list(tmp_path.iterdir()) == []
    mirrored = open_run_storage(str(tmp_path / 'run'), mirror=URL)
    assert (mirrored.workdir, mirrored.url) == (tmp_path / 'run', URL)
    assert str(mirrored.checkpoint_directory) == str(tmp_path / 'run' / 'checkpoints')
    direct = open_run_storage(f'{URL}/', cache=cache)
    assert str(direct.checkpoint_directory) == f'{URL}/checkpoints'
    assert direct.workdir == cache_directory(URL, cache) != cache_directory(f'{URL}2', cache)
    assert direct.workdir.parent == tmp_path / 'cache' / 'runs'
    assert direct.workdir.name.startswith('bucket-runs-one-')
    s3 = open_run_storage('s3://bucket/run', cache=cache)
    assert str(s3.checkpoint_directory) == str(s3.workdir / 'checkpoints')


@pytest.mark.parametrize(
    'url', ['gs://', 'gs://B/run', 's3://user:hunter2@bucket/run', 'gs://bucket/run?token=hunter2', 'http://bucket/run']
)
def test_invalid_urls(url, tmp_path):
    for workdir, mirror in ((url, ''), (str(tmp_path), url)):
        with pytest.raises(InputError, match='must have the form gs://bucket/run or s3://bucket/run') as info:
            open_run_storage(workdir, mirror=mirror)
        assert 'hunter2' not in str(info.value)
    with pytest.raises(InputError, match='is already in a bucket'):
        open_run_storage(URL, mirror='s3://bucket/run')


def test_only_the_first_process_uploads(gcs, tmp_path):
    write_step(tmp_path, 1)
    with RunStorage(tmp_path, URL, process=1, **FAST) as storage:
        storage.fetch()
    assert not gcs.objects
    with RunStorage(tmp_path, URL, process=0, **FAST):
        pass
    assert gcs.objects


@pytest.mark.parametrize('status', [401, 403, 503])
def test_secrets_are_not_logged(gcs, tmp_path, log, monkeypatch, status):
    secrets = {'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'planted-token', 'AWS_SECRET_ACCESS_KEY': 'planted-secret'}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    gcs.wire_faults.append(WireFault(status=status))
    with pytest.raises(InputError) as info:
        RunStorage(tmp_path, URL).fetch(timeout_seconds=0.0)
    write_step(tmp_path, 1)
    storage = RunStorage(tmp_path, URL, **FAST)
    storage.start()
    storage.close(timeout_seconds=0.5)
    text = '\n'.join([str(info.value), *log(), *(path.read_text() for path in tmp_path.rglob('*.json'))])
    assert URL in text
    assert not [value for value in secrets.values() if value in text]


# TensorStore reads its environment once per process.
ORBAX = """
import json, sys
import jax.numpy as jnp
import orbax.checkpoint as ocp
from maxlm.workdir.run_storage import open_run_storage
from tests.gcs_emulator import Emulator

url, cache, plan = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
emulator = Emulator.__new__(Emulator)
emulator.url = url
storage = open_run_storage('gs://bucket/runs/one', cache=cache, files_seconds=0.0)
storage.fetch()
storage.workdir.mkdir(parents=True, exist_ok=True)
(storage.workdir / 'metrics.jsonl').write_text('{"step": 1}')
results = []
def trees(kind, step):
    return kind({'w': jnp.full(2000, float(step))})
def checkpointer():
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
writer = checkpointer()
with storage:
    for step, faults in enumerate(plan, 1):
        for fault in faults:
            emulator.fault(**fault)
        try:
            writer.save(storage.checkpoint_directory / str(step), args=trees(ocp.args.StandardSave, step))
            # Raises only after all requests of the save have ended, so a later recovery cannot complete a failed step.
            writer.wait_until_finished()
        except Exception as error:
            results.append(f'{step} failed')
            # The previous checkpointer raises its stored error again at every restore.
            writer = checkpointer()
        emulator.clear()
        newest = storage.remote_steps()[-1]
        values = writer.restore(
            storage.checkpoint_directory / str(newest), args=trees(ocp.args.StandardRestore, 0)
        )['w']
        assert (values == newest).all()
        results.append([step, newest, storage.is_uploaded(step)])
print(json.dumps(results))
"""


def test_orbax_saves_into_the_bucket_through_faults(tmp_path):
    """Slow: starts processes."""
    data = r'^POST /upload'
    passing = [
        {'match': data, 'times': 3, 'status': 503},
        {'match': data, 'times': 3, 'status': 429},
        {'match': data, 'times': 2, 'drop': 'before'},
        {'match': data, 'times': 2, 'delay': 0.5},
    ]
    plan = [[], passing, [{'match': data, 'status': 403}], []]
    with running('bucket') as emulator:
        command = [sys.executable, '-c', ORBAX, emulator.url, str(tmp_path), json.dumps(plan)]
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **emulator.environment}, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        results = json.loads(result.stdout.splitlines()[-1])
        assert results == [[1, 1, True], [2, 2, True], '3 failed', [3, 2, False], [4, 4, True]]
        assert 'bucket/runs/one/metrics.jsonl' in emulator.objects
        assert len([request for request in emulator.log if request['kind'] == 'upload']) > 10
