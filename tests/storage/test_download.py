"""Tests the download of one file from servers on loopback, with injected faults."""

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from maxlm.errors import InputError
from maxlm.storage import download
from maxlm.storage.download import RemoteFile, fetch_file, remove_partial
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.retry import RetryPolicy
from tests.conftest import ROOT

CONTENT = random.Random(1).randbytes(100_000)
CHUNK = 30_000
CHUNKS = [(0, 30_000), (30_000, 60_000), (60_000, 90_000), (90_000, 100_000)]
# A separate process that downloads the file given by its arguments.
FETCH = """
import sys
from pathlib import Path
from maxlm.storage import download
download.CHUNK_BYTES = int(sys.argv[4])
download.LOCK_POLL_SECONDS = 0.01
download.fetch_file(download.RemoteFile(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture
def gcs(gcs):
    gcs.put('bucket', 'x/a.bin', CONTENT)
    return gcs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', CHUNK)


@pytest.fixture
def file(tmp_path):
    """Returns a file without a checksum, so the bucket's checksum counts."""
    return RemoteFile('gs://bucket/x/a.bin', tmp_path / 'deep' / 'a.bin', len(CONTENT))


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def names(file):
    return sorted(path.name for path in file.path.parent.iterdir())


def ranges(gcs):
    return [(request.start, request.stop) for request in gcs.asked() if request.status == 206]


def start(file):
    arguments = [file.url, str(file.path), str(file.bytes), str(CHUNK)]
    return subprocess.Popen([sys.executable, '-c', FETCH, *arguments], cwd=ROOT)


def test_file_is_downloaded_once_in_chunks(gcs, file):
    added = []
    fetch_file(file, on_bytes=added.append)
    assert file.path.read_bytes() == CONTENT
    assert names(file) == ['a.bin']
    assert ranges(gcs) == CHUNKS
    assert added == [0, CHUNK, CHUNK, CHUNK, 10_000]
    requests = len(gcs.requests)
    fetch_file(file)
    assert len(gcs.requests) == requests


def test_known_checksum_needs_no_metadata_request(gcs, file):
    fetch_file(RemoteFile(file.url, file.path, file.bytes, sha256(CONTENT)))
    assert {request.kind for request in gcs.requests} == {'media'}


@pytest.mark.parametrize('size', [0, 1, CHUNK, CHUNK + 1])
def test_odd_sizes(gcs, tmp_path, size):
    gcs.put('bucket', 'odd', CONTENT[:size])
    fetch_file(RemoteFile('gs://bucket/odd', tmp_path / 'odd', size))
    assert (tmp_path / 'odd').read_bytes() == CONTENT[:size]


@pytest.mark.multiprocess
def test_download_of_a_killed_process_is_resumed(gcs, file):
    """Slow: starts a process and kills it."""
    gcs.fault('nothing', times=2)
    held = gcs.fault('hold', times=1)
    process = start(file)
    assert held.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert names(file) == ['.a.bin.partial']
    assert file.partial.read_bytes() == CONTENT[: 2 * CHUNK]
    assert ranges(gcs) == CHUNKS[:2]
    gcs.requests.clear()
    added = []
    fetch_file(file, on_bytes=added.append)
    assert file.path.read_bytes() == CONTENT
    assert ranges(gcs) == CHUNKS[2:]
    assert sum(added) == len(CONTENT)
    assert added[0] == 2 * CHUNK


@pytest.mark.multiprocess
def test_two_processes_fetch_a_file_once(gcs, file):
    """Slow: starts two processes."""
    held = gcs.fault('hold', times=1)
    processes = [start(file) for _ in range(2)]
    assert held.reached.wait(60)
    held.released.set()
    assert [process.wait(60) for process in processes] == [0, 0]
    assert file.path.read_bytes() == CONTENT
    assert names(file) == ['a.bin']
    assert ranges(gcs) == CHUNKS


def test_threads_of_a_process_fetch_a_file_once(gcs, file, monkeypatch):
    monkeypatch.setattr(download, 'LOCK_POLL_SECONDS', 0.001)
    threads = [threading.Thread(target=fetch_file, args=(file,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.path.read_bytes() == CONTENT
    assert ranges(gcs) == CHUNKS


def retrying(file, waits):
    return functools.partial(RetryPolicy(lambda line: None, waits.append).call, file.url)


@pytest.mark.parametrize('kind', [500, 503, 429, 'reset', 'truncate'])
def test_transient_errors_are_retried(gcs, file, kind):
    gcs.fault(kind, times=20)
    waits = []
    fetch_file(file, call=retrying(file, waits))
    assert file.path.read_bytes() == CONTENT
    # gcsfs itself makes six attempts per request.
    assert waits == [1, 2, 4]
    # Received chunks are not requested again.
    successful = [request for request in gcs.asked()[20:] if request.status == 206]
    assert [(request.start, request.stop) for request in successful] == CHUNKS


def test_transient_errors_are_raised_without_a_retry_policy(gcs, file):
    gcs.fault(503)
    with pytest.raises(TransientStorageError, match=r'^gs://bucket/x/a.bin: the server returned status 503$'):
        fetch_file(file)
    gcs.vanish()
    with pytest.raises(TransientStorageError, match=r'no answer \(Connection refused\)'):
        fetch_file(file)
    gcs.faults.clear()
    gcs.appear()
    gcs.buckets.clear()
    with pytest.raises(TransientStorageError, match='bucket bucket does not exist'):
        fetch_file(file)
    gcs.buckets.add('bucket')
    fetch_file(file)
    assert file.path.read_bytes() == CONTENT


@pytest.mark.parametrize(('kind', 'reason'), [(403, 'access denied'), (401, 'no valid credentials'), (404, 'No such')])
@pytest.mark.parametrize('requests', ['media', 'get'])
def test_permanent_errors_are_raised(gcs, file, kind, reason, requests):
    if requests == 'get':
        # If the object itself is not accessible, gcsfs looks for it in a listing.
        gcs.fault(kind, requests='list')
    gcs.fault(kind, requests=requests)
    with pytest.raises(InputError, match=f'gs://bucket/x/a.bin: {reason}') as raised:
        fetch_file(file, call=retrying(file, waits := []))
    assert waits == []
    assert not isinstance(raised.value, TransientStorageError)
    assert not file.path.exists()


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('composed', [True, False])
def test_flipped_bit_is_detected_and_downloaded_again(gcs, file, known, composed):
    """The bucket's MD5 counts if maxlm has no checksum, or its CRC32C if there is no MD5."""
    gcs.put('bucket', 'x/a.bin', CONTENT, composed=composed)
    file = RemoteFile(file.url, file.path, file.bytes, sha256(CONTENT) if known else '')
    gcs.fault('flip', times=1)
    added = []
    fetch_file(file, on_bytes=added.append)
    assert file.path.read_bytes() == CONTENT
    assert ranges(gcs) == 2 * CHUNKS
    assert sum(added) == len(CONTENT)
    file.path.unlink()
    gcs.fault('flip')
    with pytest.raises(
        InputError,
        match=r'damaged in two attempts: its (sha256|md5|crc32c) is \S+, not \S+; run the same command again$',
    ):
        fetch_file(file)
    assert not file.path.exists()


def test_partial_file_with_other_content_is_discarded(gcs, file):
    file.path.parent.mkdir()
    for wrong in (bytes(50_000), bytes(200_000), bytes(len(CONTENT))):
        file.partial.write_bytes(wrong)
        fetch_file(file)
        assert file.path.read_bytes() == CONTENT
        assert names(file) == ['a.bin']
        file.path.unlink()


def test_a_file_of_another_size_is_refused(gcs, file):
    longer = RemoteFile(file.url, file.path, len(CONTENT) + 1)
    with pytest.raises(InputError, match=r'requested bytes 90000 to 100001 but received 10000 bytes'):
        fetch_file(longer)
    shorter = RemoteFile(file.url, file.path, len(CONTENT) - 1)
    with pytest.raises(InputError, match='damaged in two attempts'):
        fetch_file(shorter)


def test_s3(s3, tmp_path):
    s3.put_object(Bucket='bucket', Key='x/a.bin', Body=CONTENT)
    file = RemoteFile('s3://bucket/x/a.bin', tmp_path / 'a.bin', len(CONTENT))
    fetch_file(file)
    assert file.path.read_bytes() == CONTENT
    file.path.unlink()
    # The object's ETag is an MD5, so a partial file with other content is detected.
    file.partial.write_bytes(bytes(CHUNK))
    fetch_file(file)
    assert file.path.read_bytes() == CONTENT
    with pytest.raises(InputError, match=r's3://bucket/x/b.bin: No such file'):
        fetch_file(RemoteFile('s3://bucket/x/b.bin', tmp_path / 'b.bin', 5))
    with pytest.raises(TransientStorageError, match='bucket other does not exist'):
        fetch_file(RemoteFile('s3://other/x/b.bin', tmp_path / 'b.bin', 5))


def test_download_without_checksum_is_resumed_only_for_the_same_version(s3, tmp_path):
    """S3 objects of multipart uploads have no MD5."""

    def put(content):
        upload = s3.create_multipart_upload(Bucket='bucket', Key='a.bin')['UploadId']
        facts = {'Bucket': 'bucket', 'Key': 'a.bin', 'UploadId': upload}
        part = s3.upload_part(**facts, PartNumber=1, Body=content)
        s3.complete_multipart_upload(**facts, MultipartUpload={'Parts': [{'PartNumber': 1, 'ETag': part['ETag']}]})

    class StopError(Exception):
        pass

    def stop_after(num_bytes):
        left = num_bytes

        def on_bytes(added):
            nonlocal left
            left -= added
            if left <= 0:
                raise StopError

        return on_bytes

    put(CONTENT)
    file = RemoteFile('s3://bucket/a.bin', tmp_path / 'a.bin', len(CONTENT))
    with pytest.raises(StopError):
        fetch_file(file, on_bytes=stop_after(2 * CHUNK))
    assert names(file) == ['.a.bin.partial', '.a.bin.version']
    added = []
    fetch_file(file, on_bytes=added.append)
    assert added[0] == 2 * CHUNK
    assert file.path.read_bytes() == CONTENT
    assert names(file) == ['a.bin']

    file.path.unlink()
    with pytest.raises(StopError):
        fetch_file(file, on_bytes=stop_after(2 * CHUNK))
    put(CONTENT[::-1])
    del added[:]
    fetch_file(file, on_bytes=added.append)
    assert added[0] == 0
    assert file.path.read_bytes() == CONTENT[::-1]

    # The object changes during every download.
    file.path.unlink()
    contents = iter([CONTENT, CONTENT[::-1]] * 5)
    with pytest.raises(InputError, match='damaged in two attempts: its version changes during the download'):
        fetch_file(file, on_bytes=lambda added: put(next(contents)) if added == CHUNK else None)


def test_unwritable_path_is_named(gcs, file, monkeypatch):
    file.path.parent.mkdir()

    def full(descriptor, content, start):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'pwrite', full)
    with pytest.raises(
        InputError, match=r'a.bin: cannot be written: No space left on device; check permissions and disk space$'
    ):
        fetch_file(file)
    monkeypatch.undo()
    file.path.parent.joinpath('b').write_text('a file')
    with pytest.raises(InputError, match=r'b/a.bin: cannot be written: '):
        fetch_file(RemoteFile(file.url, file.path.parent / 'b' / 'a.bin', 5))


def test_partial_file_of_a_running_download_is_not_removed(gcs, file):
    held = gcs.fault('hold', times=1)
    thread = threading.Thread(target=fetch_file, args=(file,))
    thread.start()
    assert held.reached.wait(60)
    remove_partial(file)
    assert file.partial.exists()
    held.released.set()
    thread.join()
    assert file.path.read_bytes() == CONTENT
    file.partial.write_bytes(b'left')
    remove_partial(file)
    remove_partial(file)
    assert names(file) == ['a.bin']


@pytest.mark.parametrize('protocol', ['file', 'memory'])
def test_other_file_systems(tmp_path, protocol):
    import fsspec

    url = f'{protocol}://{tmp_path}/there.bin'
    with fsspec.open(url, 'wb') as target:
        target.write(CONTENT)
    fetch_file(RemoteFile(url, tmp_path / 'here.bin', len(CONTENT)))
    assert (tmp_path / 'here.bin').read_bytes() == CONTENT
    with pytest.raises(InputError, match='No such file'):
        fetch_file(RemoteFile(f'{url}.not', tmp_path / 'not.bin', 5))
