"""Tests checkpoints in a bucket: uploads are atomic, send each file once, and restore the same bytes."""

import json
import shutil

import pytest

from maxlm.errors import InputError
from maxlm.storage import bucket as bucket_module
from maxlm.storage.bucket import Bucket, BucketError, PermissionDeniedError
from maxlm.workdir.bucket_steps import (
    MANIFEST,
    complete_steps,
    delete_step,
    download_step,
    listed_steps,
    upload_step,
)
from maxlm.workdir.step_dirs import COMMIT_MARKER
from tests.gcs_emulator import WireFault
from tests.workdir.steps import NAMES, content, write_step

# Matches the request that writes an object.
WRITES = r'^POST /upload'


def describe(bucket, folder):
    return {name: bucket.describe(folder / name) for name in content(folder)}


def upload(bucket, step, folder):
    upload_step(bucket, step, describe(bucket, folder), lambda *_: None)


def uploads(gcs):
    uploaded = [request.name for request in gcs.asked('upload') if request.status == 200]
    return [name.removeprefix('runs/one/checkpoints/') for name in uploaded]


def test_uploaded_step_is_downloaded_unchanged(bucket, tmp_path):
    folder = write_step(tmp_path, 3)
    assert complete_steps(bucket) == []
    upload(bucket, 3, folder)
    assert complete_steps(bucket) == [3]
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)
    assert content(folder) != content(write_step(tmp_path, 4))
    delete_step(bucket, 3)
    assert listed_steps(bucket) == {}


def test_multipart_uploads(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_module, 'PART_BYTES', 5 * 2**20)
    folder = write_step(tmp_path, 3)
    for number, size in enumerate((5 * 2**20 - 1, 10 * 2**20, 10 * 2**20 + 1)):
        (folder / f'large{number}').write_bytes(bytes(range(251)) * (size // 251) + b'x' * (size % 251))
    upload(bucket, 3, folder)
    listed = bucket.list('checkpoints/3')
    for name, file in describe(bucket, folder).items():
        assert listed[f'checkpoints/3/{name}'] == (file.size, file.digest), name
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


def test_commit_marker_is_uploaded_last(gcs, tmp_path):
    upload(Bucket('gs://bucket/runs/one'), 3, write_step(tmp_path, 3))
    sent = uploads(gcs)
    assert sent[-2:] == [f'3/{MANIFEST}', f'3/{COMMIT_MARKER}']
    # Orbax also expects a marker in each item.
    assert {*sent[:-2]} == {f'3/{name}' for name in (*NAMES, f'params/{COMMIT_MARKER}', f'progress/{COMMIT_MARKER}')}


@pytest.mark.parametrize('served', range(9))
def test_interrupted_upload_is_invisible_and_can_be_resumed(gcs, tmp_path, served):
    bucket, folder = Bucket('gs://bucket/runs/one'), write_step(tmp_path, 3)
    for _ in range(served):
        gcs.wire_faults.append(WireFault(WRITES, times=1))
    gcs.wire_faults.append(WireFault(WRITES, status=403))
    with pytest.raises(PermissionDeniedError, match='gs://bucket/runs/one/checkpoints/3'):
        upload(bucket, 3, folder)
    assert complete_steps(bucket) == []
    gcs.wire_faults.clear()
    before = set(uploads(gcs))
    upload(bucket, 3, folder)
    assert complete_steps(bucket) == [3]
    sent = uploads(gcs)
    assert len(before) == served
    # Markers and the manifest are small and may be sent again; no other file is sent twice.
    assert all(sent.count(f'3/{name}') == 1 for name in NAMES)
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


def test_only_changed_files_are_uploaded_again(bucket, tmp_path, monkeypatch):
    sent = []
    put_file = Bucket.put_file

    def recording_put(self, name, path, on_bytes):
        sent.append(name.removeprefix('checkpoints/3/'))
        put_file(self, name, path, on_bytes)

    monkeypatch.setattr(Bucket, 'put_file', recording_put)
    folder = write_step(tmp_path, 3)
    upload(bucket, 3, folder)
    assert sorted(sent) == sorted(NAMES)
    sent.clear()
    upload(bucket, 3, folder)
    assert sent == []
    # The changed file has the same size.
    bucket.delete([f'checkpoints/3/{COMMIT_MARKER}'])
    before = (folder / NAMES[2]).read_bytes()
    (folder / NAMES[2]).write_bytes(before[:-1] + b'!')
    upload(bucket, 3, folder)
    assert sent == [NAMES[2]]
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


def test_a_step_that_lost_files_is_not_uploaded_again(bucket, tmp_path, monkeypatch):
    folder = write_step(tmp_path, 3)
    upload(bucket, 3, folder)
    (folder / NAMES[1]).unlink()
    monkeypatch.setattr(Bucket, 'put_file', None)
    upload(bucket, 3, folder)
    assert complete_steps(bucket) == [3]
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)
    assert f'checkpoints/3/{NAMES[1]}' not in bucket.list()


def test_step_with_the_same_number_is_replaced(bucket, tmp_path):
    upload(bucket, 3, write_step(tmp_path / 'a', 3))
    bucket.put('checkpoints/3/surplus', b'x')
    other = write_step(tmp_path / 'b', 3, 'another attempt')
    upload(bucket, 3, other)
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(other)
    assert 'checkpoints/3/surplus' not in bucket.list()


def test_transient_faults_are_retried(gcs, tmp_path):
    bucket, folder = Bucket('gs://bucket/runs/one'), write_step(tmp_path, 3)
    for facts in ({'status': 503}, {'status': 429}, {'drop': 'before'}, {'drop': 'after'}, {'delay': 0.3}):
        # A single request may have all of these faults, so their number must not exceed the client's retries.
        gcs.wire_faults.append(WireFault(WRITES, times=1, **facts))
    upload(bucket, 3, folder)
    assert complete_steps(bucket) == [3]
    assert not [fault for fault in gcs.wire_faults if fault.times]
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


@pytest.mark.parametrize('served', range(1, 6))
def test_interrupted_deletion_leaves_no_complete_step(gcs, tmp_path, served):
    bucket, folder = Bucket('gs://bucket/runs/one'), write_step(tmp_path, 3)
    upload(bucket, 3, folder)
    for _ in range(served):
        gcs.wire_faults.append(WireFault('^DELETE', times=1))
    gcs.wire_faults.append(WireFault('^DELETE', status=403))
    with pytest.raises(BucketError):
        delete_step(bucket, 3)
    assert complete_steps(bucket) == []
    assert listed_steps(bucket).keys() == {3}
    gcs.wire_faults.clear()
    delete_step(bucket, 3)
    assert listed_steps(bucket) == {}


def test_damage_in_the_bucket_is_detected(bucket, tmp_path):
    folder = write_step(tmp_path, 3)
    upload(bucket, 3, folder)
    before = (folder / NAMES[3]).read_bytes()
    bucket.put(f'checkpoints/3/{NAMES[3]}', before[:-1] + b'!')
    with pytest.raises(InputError, match=f'checkpoints/3/{NAMES[3]}: download damaged'):
        download_step(bucket, 3, tmp_path / 'back')
    bucket.put(f'checkpoints/3/{NAMES[3]}', before)
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


def test_files_of_an_earlier_download_are_checked(bucket, tmp_path):
    folder = write_step(tmp_path, 3)
    upload(bucket, 3, folder)
    shutil.copytree(folder, tmp_path / 'back')
    (tmp_path / 'back' / NAMES[2]).write_bytes((folder / NAMES[2]).read_bytes()[:-1] + b'!')
    (tmp_path / 'back' / 'surplus').write_bytes(b'x')
    download_step(bucket, 3, tmp_path / 'back')
    assert content(tmp_path / 'back') == content(folder)


@pytest.mark.parametrize(
    'manifest', [b'', b'[]', b'{"files": 3}', b'{"files": {"a": 1}}', b'{"files": {"../../out": [1, "aa"]}}']
)
def test_invalid_manifest(bucket, tmp_path, manifest):
    upload(bucket, 3, write_step(tmp_path, 3))
    facts = json.loads(bucket.read(f'checkpoints/3/{MANIFEST}'))
    assert facts['files'].keys() == {*NAMES}
    bucket.put(f'checkpoints/3/{MANIFEST}', manifest)
    with pytest.raises(InputError, match=rf'checkpoints/3/{MANIFEST}: .*choose another step'):
        download_step(bucket, 3, tmp_path / 'deep' / 'back')
    assert not (tmp_path / 'out').exists()
