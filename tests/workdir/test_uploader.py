"""Tests background uploads: order, allowed deletions, and faults that never affect the run."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from maxlm.storage.bucket import Bucket
from maxlm.workdir import uploader as mirror_module
from maxlm.workdir.bucket_steps import complete_steps, download_step, listed_steps
from maxlm.workdir.run_storage import RunStorage
from maxlm.workdir.step_dirs import DAMAGED
from maxlm.workdir.upload_state import MIRROR, UploadState
from maxlm.workdir.uploader import StepMirror, UploadProgress
from tests.conftest import ROOT
from tests.gcs_emulator import WireFault, running
from tests.waiting import until
from tests.workdir.steps import NAMES, content, write_step

URL = 'gs://bucket/runs/one'
WRITES = r'^POST /upload'
FAST = {'poll_seconds': 0.01, 'files_seconds': 0.0}


def mirror_of(workdir, bucket, **options):
    return StepMirror(bucket, UploadState(workdir, bucket.url), progress=UploadProgress(bucket.url), **options)


def run_until_idle(mirror):
    while mirror.work():
        pass


def remove(workdir, *steps):
    for step in steps:
        shutil.rmtree(workdir / 'checkpoints' / str(step))


def test_bucket_mirrors_local_steps(bucket, tmp_path):
    mirror = mirror_of(tmp_path, bucket)
    assert not mirror.work()
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    assert UploadState(tmp_path, bucket.url).pending() == [1, 2, 3]
    # The latest checkpoint is uploaded first.
    assert mirror.work()
    assert complete_steps(bucket) == [3]
    run_until_idle(mirror)
    assert complete_steps(bucket) == [1, 2, 3]
    remove(tmp_path, 1, 3)
    write_step(tmp_path, 4)
    # Another mirror, as in a later attempt, has the same state.
    run_until_idle(mirror_of(tmp_path, bucket))
    assert complete_steps(bucket) == [2, 4]
    assert UploadState(tmp_path, bucket.url).pending() == []
    assert {path.name for path in (tmp_path / MIRROR).iterdir()} == {'record.json'}


def test_the_last_copy_is_not_deleted(bucket, tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    run_until_idle(mirror_of(tmp_path, bucket))
    remove(tmp_path, 1, 2)
    run_until_idle(mirror_of(tmp_path, bucket))
    assert complete_steps(bucket) == [1, 2]
    # The local step was set aside as damaged, so the bucket may have the last intact copy.
    (tmp_path / 'checkpoints' / DAMAGED / '2').mkdir(parents=True)
    (tmp_path / 'checkpoints' / DAMAGED / '11').mkdir()
    write_step(tmp_path, 3)
    run_until_idle(mirror_of(tmp_path, bucket))
    assert complete_steps(bucket) == [2, 3]


def test_old_step_is_deleted_after_a_newer_step_is_complete(gcs, tmp_path):
    bucket = Bucket(URL)
    write_step(tmp_path, 1)
    mirror = mirror_of(tmp_path, bucket)
    run_until_idle(mirror)
    remove(tmp_path, 1)
    write_step(tmp_path, 2)
    gcs.wire_faults.append(WireFault(WRITES, status=403))
    for _ in range(3):
        with pytest.raises(Exception, match='injected: 403'):
            mirror.work()
    assert complete_steps(bucket) == [1]
    gcs.wire_faults.clear()
    run_until_idle(mirror)
    assert complete_steps(bucket) == [2]


def test_new_step_with_an_old_number_is_uploaded(bucket, tmp_path):
    write_step(tmp_path, 1)
    run_until_idle(mirror_of(tmp_path, bucket))
    remove(tmp_path, 1)
    other = write_step(tmp_path, 1, 'another attempt')
    run_until_idle(mirror_of(tmp_path, bucket))
    download_step(bucket, 1, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(other)


def test_steps_of_other_machines(bucket, tmp_path):
    for step in (1, 2, 3):
        write_step(tmp_path / 'a', step)
    run_until_idle(mirror_of(tmp_path / 'a', bucket))
    bucket.put('checkpoints/4/left', b'partial step')
    bucket.put('checkpoints/6/left', b'partial newer step')
    write_step(tmp_path / 'b', 5)
    run_until_idle(mirror_of(tmp_path / 'b', bucket))
    assert complete_steps(bucket) == [1, 2, 3, 5]
    assert listed_steps(bucket).keys() == {1, 2, 3, 5, 6}
    listed = []

    def surplus(steps):
        listed.append(steps)
        return {1, 3, 5, 7}

    write_step(tmp_path / 'b', 7)
    run_until_idle(mirror_of(tmp_path / 'b', bucket, surplus=surplus))
    assert listed == [[1, 2, 3, 5, 7]]
    # Checkpoints that the directory contains are not deleted.
    assert complete_steps(bucket) == [2, 5, 7]


def test_step_deleted_during_its_upload(gcs, tmp_path):
    write_step(tmp_path, 1)
    hold = gcs.fault('hold', '*/0a1b', requests='upload')
    mirror = mirror_of(tmp_path, Bucket(URL))
    thread = threading.Thread(target=mirror.work)
    thread.start()
    assert hold.reached.wait(30)
    expected = content(tmp_path / 'checkpoints' / '1')
    remove(tmp_path, 1)
    hold.released.set()
    thread.join()
    assert complete_steps(Bucket(URL)) == [1]
    download_step(Bucket(URL), 1, tmp_path / 'back')
    assert content(tmp_path / 'back') == expected


def test_upload_without_hard_links(gcs, tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(os, 'link', no_links)
    write_step(tmp_path, 1)
    run_until_idle(mirror_of(tmp_path, Bucket(URL)))
    assert complete_steps(Bucket(URL)) == [1]
    assert content(tmp_path / MIRROR).keys() == {'record.json'}


@pytest.mark.parametrize('fault', ['outage', '403', '503'])
def test_training_continues_during_an_outage(gcs, tmp_path, log, fault):
    with RunStorage(tmp_path, URL, **FAST) as storage:
        write_step(tmp_path, 1)
        until(lambda: storage.is_uploaded(1))
        if fault == 'outage':
            gcs.vanish()
        else:
            gcs.wire_faults.append(WireFault(status=int(fault)))
        # Training continues without waiting.
        for step in range(2, 6):
            write_step(tmp_path, step)
        until(lambda: [line for line in log() if 'retrying' in line])
        assert not storage.is_uploaded(5)
        gcs.appear() if fault == 'outage' else gcs.wire_faults.clear()
        write_step(tmp_path, 6)
        until(lambda: storage.is_uploaded(6))
    assert storage.remote_steps() == [1, 2, 3, 4, 5, 6]
    assert [line for line in log() if 'responds again' in line]


def test_stalled_upload_is_reported(gcs, tmp_path, log):
    hold = gcs.fault('hold', '*/0a1b', requests='upload')
    with RunStorage(tmp_path, URL, stall_seconds=0.2, **FAST):
        write_step(tmp_path, 1)
        until(lambda: [line for line in log() if 'no upload progress for' in line])
        hold.released.set()
    assert complete_steps(Bucket(URL)) == [1]


def test_no_warning_without_a_stall(gcs, tmp_path, log):
    with RunStorage(tmp_path, URL, **FAST) as storage:
        write_step(tmp_path, 1)
        until(lambda: storage.is_uploaded(1))
    assert [line for line in log() if 'no upload progress' in line or 'retrying' in line] == []
    assert mirror_module.STALL_SECONDS < 60


def test_close_has_a_timeout(gcs, tmp_path, log, monkeypatch):
    # Failed requests do not count as progress.
    monkeypatch.setattr(mirror_module, 'MAX_WAIT_AT_END', 0.01)
    storage = RunStorage(tmp_path, URL, **FAST)
    storage.start()
    gcs.vanish()
    write_step(tmp_path, 7)
    storage.close(timeout_seconds=0.3)
    assert [line for line in log() if 'steps 7 are only in' in line]
    gcs.appear()
    # A later attempt uploads the step.
    with RunStorage(tmp_path, URL, **FAST):
        pass
    assert complete_steps(Bucket(URL)) == [7]


UPLOADER = """
import sys
from pathlib import Path
from maxlm.workdir.run_storage import RunStorage
with RunStorage(Path(sys.argv[1]), 'gs://bucket/runs/one', poll_seconds=0.01):
    pass
"""


def test_a_killed_upload_is_resumed(tmp_path, monkeypatch):
    """Slow: starts processes."""
    with running('bucket') as emulator:
        emulator.patch_environment(monkeypatch)
        write_step(tmp_path, 1)
        folder = write_step(tmp_path, 2)
        files = {f'runs/one/checkpoints/2/{name}' for name in NAMES}

        def sent():
            uploaded = [request['name'] for request in emulator.log if request['kind'] == 'upload']
            return [name for name in uploaded if name in files]

        # Two uploads succeed, and the remaining uploads hang.
        emulator.fault(WRITES, times=2)
        emulator.fault(WRITES, delay=60)
        process = subprocess.Popen([sys.executable, '-c', UPLOADER, str(tmp_path)], cwd=ROOT)
        until(lambda: len(sent()) >= 2, 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        emulator.clear()
        assert not [name for name in emulator.objects if name.endswith('/2/commit_success.txt')]
        with RunStorage(tmp_path, URL, **FAST):
            pass
        assert len(sent()) == len(set(sent())) == len(NAMES)
        restored = RunStorage(tmp_path / 'new', URL)
        restored.fetch()
        assert restored.remote_steps() == [1, 2]
        assert content(tmp_path / 'new' / 'checkpoints' / '2') == content(folder)
