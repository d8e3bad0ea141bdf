"""Tests prefetching of shards: one training process and its readers, with a local bucket that fails."""

import itertools
import queue
import subprocess
import sys
import threading

import pytest

from maxlm.data.dataset import shard_cache
from maxlm.data.dataset.cache_policy import PlannedRead
from maxlm.data.dataset.shard_cache import Fetcher
from maxlm.data.dataset.wait import wait_for_file
from maxlm.errors import InputError
from maxlm.storage import download
from tests.conftest import ROOT
from tests.data.dataset.conftest import CONTENTS, SIZE

WAIT = """
import sys
from pathlib import Path
from maxlm.data.dataset.wait import wait_for_file
from maxlm.errors import InputError
print('waiting', flush=True)
try:
    wait_for_file(Path(sys.argv[1]))
    print('fetched')
except InputError as error:
    print(error)
assert 'fsspec' not in sys.modules
"""


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', 300)
    monkeypatch.setattr(download, 'LOCK_POLL_SECONDS', 0.001)
    monkeypatch.setattr('maxlm.data.dataset.wait.POLL_SECONDS', 0.001)


def each_epoch(files, steps_each=2):
    """Yields an endless plan that reads each file in order for `steps_each` steps."""
    for number in itertools.count():
        yield PlannedRead((files[number % len(files)],), number * steps_each, (number + 1) * steps_each - 1)


def cached(files):
    return [number for number, file in enumerate(files) if file.is_complete]


def disk_usage(files):
    sizes = []
    for path in files[0].path.parent.iterdir():
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def read(file):
    wait_for_file(file.path)
    return file.path.read_bytes()


def test_files_are_fetched_in_parallel_and_once(gcs, files, warnings):
    """Delays the response for the first file until the others are complete, which requires parallel downloads."""
    fault = gcs.fault('hold', match='data/0', times=1)
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=warnings.append, threads=4):
        assert fault.reached.wait(60)
        for file, content in list(zip(files, CONTENTS, strict=True))[1:]:
            assert read(file) == content
        assert not files[0].is_complete
        fault.released.set()
        assert read(files[0]) == CONTENTS[0]
    assert len(gcs.asked()) == 4 * len(files)
    with Fetcher(each_epoch(files), on_warning=warnings.append) as fetcher:
        for step in range(50):
            fetcher.advance(step)
            assert read(files[step // 2 % 8]) == CONTENTS[step // 2 % 8]
    assert len(gcs.asked()) == 4 * len(files)
    assert warnings == []
    assert sorted(path.name for path in files[0].path.parent.iterdir()) == sorted(['.fetching', *'01234567'])


@pytest.mark.parametrize('capacity', [1000, 2000, 3500])
def test_disk_usage_is_bounded_at_all_times(gcs, files, warnings, capacity):
    usage = []
    with Fetcher(
        each_epoch(files),
        capacity_bytes=capacity,
        on_warning=warnings.append,
        all_files=files,
        on_bytes=lambda added: usage.append(disk_usage(files)),
    ) as fetcher:
        for step in range(48):
            fetcher.advance(step)
            number = step // 2 % 8
            assert read(files[number]) == CONTENTS[number]
            usage.append(disk_usage(files))
            # A file that is in use is not evicted.
            assert files[number].is_complete
    assert max(usage) <= capacity
    assert max(usage) > capacity - SIZE
    assert len(gcs.asked()) >= 3 * 8 * 4 - 4
    assert warnings == []
    # Control: without the limit, all files are kept.
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=warnings.append):
        for file in files:
            wait_for_file(file.path)
    assert disk_usage(files) == 8 * SIZE


def test_an_open_file_can_be_read_after_its_eviction(gcs, files, warnings):
    with Fetcher(each_epoch(files, 1), capacity_bytes=SIZE, on_warning=warnings.append) as fetcher:
        wait_for_file(files[0].path)
        with files[0].path.open('rb') as opened:
            fetcher.advance(1)
            wait_for_file(files[1].path)
            assert not files[0].path.exists()
            assert opened.read() == CONTENTS[0]


def test_the_next_run_resumes_downloads_and_evicts_unused_files(gcs, files, warnings):
    with Fetcher([PlannedRead(tuple(files[:3]), 0, 0)], on_warning=warnings.append):
        for file in files[:3]:
            wait_for_file(file.path)
    files[3].partial.write_bytes(CONTENTS[3][:600])
    gcs.requests.clear()
    with Fetcher(
        [PlannedRead((files[0], files[3]), 0, 0)], capacity_bytes=2000, on_warning=warnings.append, all_files=files
    ):
        assert read(files[3]) == CONTENTS[3]
    assert cached(files) == [0, 3]
    assert [(request.name, request.start) for request in gcs.asked()] == [('data/3', 600), ('data/3', 900)]


def test_training_continues_with_cached_files_during_an_outage(gcs, files, warnings):
    waits = queue.SimpleQueue()
    proceed = threading.Semaphore(0)

    def wait(seconds):
        waits.put(seconds)
        proceed.acquire()

    with Fetcher(
        each_epoch(files), capacity_bytes=2000, threads=1, on_warning=warnings.append, all_files=files, wait=wait
    ) as fetcher:
        wait_for_file(files[0].path)
        wait_for_file(files[1].path)
        gcs.vanish()
        # Steps 0 to 3 need only cached files.
        for step in range(4):
            fetcher.advance(step)
            assert read(files[step // 2]) == CONTENTS[step // 2]
        delays = []
        for _ in range(9):
            delays.append(waits.get())
            proceed.release()
        assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert warnings == [
            f'gs://bucket/data/2: no answer (Connection refused); failure{again}, retrying in {seconds} s'
            for again, seconds in (('', 1), (' 2 in a row', 2), (' 4 in a row', 8), (' 8 in a row', 60))
        ]
        # A reader may wait during the outage.
        reader = threading.Thread(target=wait_for_file, args=(files[2].path,))
        reader.start()
        waits.get()
        assert not files[2].is_complete
        gcs.appear()
        proceed.release(100)
        reader.join()
        assert read(files[2]) == CONTENTS[2]
        assert warnings[4:] == ['gs://bucket/data/2: the bucket responds again']
        fetcher.advance(4)
        assert read(files[3]) == CONTENTS[3]


@pytest.mark.parametrize(
    ('kind', 'reason'), [(403, 'access denied'), (404, 'No such file'), ('flip', 'download damaged in two attempts')]
)
def test_waiting_readers_get_the_reason_of_a_failed_download(gcs, files, warnings, kind, reason):
    gcs.fault(kind, match='data/1')
    with Fetcher([PlannedRead((file,), step, step) for step, file in enumerate(files)], on_warning=warnings.append):
        with pytest.raises(InputError, match=rf'^gs://bucket/data/1: {reason}'):
            wait_for_file(files[1].path)
        # Other files are not affected.
        assert read(files[2]) == CONTENTS[2]
    assert len(warnings) == 1
    # The next start removes the record of the failure.
    gcs.faults.clear()
    with Fetcher([], all_files=files, on_warning=warnings.append):
        pass
    assert not list(files[0].path.parent.glob('.*.failed'))
    with Fetcher([PlannedRead((files[1],), 0, 0)], on_warning=warnings.append):
        assert read(files[1]) == CONTENTS[1]
    assert len(warnings) == 1


def start_reader(path):
    process = subprocess.Popen(
        [sys.executable, '-c', WAIT, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'waiting\n'
    return process


def output_of(process):
    # `communicate` would miss output that `readline` has already buffered.
    with process:
        assert process.stderr.read() == ''
        return process.stdout.read()


@pytest.mark.multiprocess
def test_readers_in_other_processes_wait(gcs, files, warnings):
    """Starts three processes in sequence, which makes this test slow."""
    fault = gcs.fault('hold', match='data/0')
    gcs.fault(403, match='data/1')
    missing = files[0].path.parent / 'x'
    with Fetcher([PlannedRead((file,), 0, 0) for file in files], on_warning=warnings.append) as fetcher:
        assert fault.reached.wait(60)
        process = start_reader(files[0].path)
        fault.released.set()
        assert output_of(process) == 'fetched\n'
        assert output_of(start_reader(files[1].path)).startswith('gs://bucket/data/1: access denied')
        process = start_reader(missing)
        assert process.poll() is None
        fetcher.close()
        assert (
            output_of(process) == f'{missing} is missing, and no process is fetching it; run the same command again\n'
        )


def test_closing_the_fetcher_wakes_waiting_threads(gcs, files, warnings):
    gcs.fault(503)
    raised = queue.SimpleQueue()

    def reader():
        try:
            wait_for_file(files[0].path)
        except InputError as error:
            raised.put(str(error))

    fetcher = Fetcher(each_epoch(files), on_warning=warnings.append)
    with fetcher:
        thread = threading.Thread(target=reader)
        thread.start()
    thread.join()
    assert raised.get() == f'{files[0].path} is missing, and no process is fetching it; run the same command again'
    # Closing the fetcher is not reported as a recovery of the bucket.
    assert not any('responds again' in warning for warning in warnings)


def test_an_existing_file_needs_no_fetcher(tmp_path):
    (tmp_path / 'marker').touch()
    wait_for_file(tmp_path / 'marker')
    with pytest.raises(InputError, match='missing is missing, and no process is fetching it'):
        wait_for_file(tmp_path / 'missing')


def test_two_fetchers_share_a_directory(gcs, files, warnings):
    with (
        Fetcher(each_epoch(files), on_warning=warnings.append) as first,
        Fetcher(each_epoch(files[::-1]), on_warning=warnings.append) as second,
    ):
        for step in range(16):
            first.advance(step)
            second.advance(step)
            assert read(files[step // 2]) == CONTENTS[step // 2]
            assert read(files[7 - step // 2]) == CONTENTS[7 - step // 2]
    assert len(gcs.asked()) == 4 * len(files)
    assert warnings == []


def test_a_deleted_file_is_fetched_again(gcs, files, warnings, monkeypatch):
    monkeypatch.setattr(shard_cache, 'RECHECK_SECONDS', 0.01)
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=warnings.append):
        for file in files:
            wait_for_file(file.path)
        files[4].path.unlink()
        assert read(files[4]) == CONTENTS[4]


def test_a_limit_that_is_too_small_is_rejected(files, warnings):
    reads = [PlannedRead((files[0],), 0, 5), PlannedRead((files[1],), 0, 1), PlannedRead((files[2], files[1]), 2, 4)]
    with pytest.raises(InputError, match=r'a cache of 2,999 bytes is too small: step 2 reads files of 3,000 bytes'):
        Fetcher(reads, capacity_bytes=2999, on_warning=warnings.append)
    Fetcher(reads, capacity_bytes=3000, on_warning=warnings.append)


def test_readers_get_the_error_of_a_limit_that_is_too_small(gcs, files, warnings, monkeypatch):
    monkeypatch.setattr(shard_cache, 'CHECKED_USES', 1)
    reads = [PlannedRead((files[0],), 0, 5), PlannedRead((files[1],), 1, 1)]
    with Fetcher(reads, capacity_bytes=1500, on_warning=warnings.append) as fetcher:
        wait_for_file(files[0].path)
        fetcher.advance(1)
        fetcher._wake.set()
        with pytest.raises(InputError, match='a cache of 1,500 bytes is too small: step 1 reads files of 2,000 bytes'):
            wait_for_file(files[1].path)


def test_an_error_in_the_read_order_wakes_readers(gcs, files, warnings, monkeypatch):
    monkeypatch.setattr(shard_cache, 'CHECKED_USES', 1)
    monkeypatch.setattr(threading, 'excepthook', lambda _: None)

    def reads():
        yield PlannedRead((files[0],), 0, 0)
        raise ArithmeticError('beyond its end')

    with Fetcher(reads(), all_files=files, on_warning=warnings.append) as fetcher:
        with pytest.raises(InputError, match='no process is fetching it'):
            wait_for_file(files[1].path)
        with pytest.raises(InputError, match='cannot determine which files to fetch: ArithmeticError: beyond its end'):
            fetcher.advance(1)


def test_a_cache_that_cannot_be_written_is_named(gcs, files, warnings, tmp_path, monkeypatch):
    (tmp_path / 'cache').write_text('a file')
    with pytest.raises(InputError, match=r'cache: .*; use a writable cache directory'):
        Fetcher([PlannedRead((files[0],), 0, 0)], on_warning=warnings.append).__enter__()
    (tmp_path / 'cache').unlink()

    def fail_with_full_disk(path, content, **_):
        raise InputError(f'{path}: cannot be written: No space left on device')

    monkeypatch.setattr(shard_cache, 'atomic_write', fail_with_full_disk)
    gcs.fault(403, match='data/1')
    # Readers do not wait if the reason cannot be written either.
    with Fetcher([PlannedRead((files[1],), 0, 0)], on_warning=warnings.append) as fetcher:
        with pytest.raises(InputError, match='no process is fetching it'):
            wait_for_file(files[1].path)
        with pytest.raises(InputError, match='No space left on device; gs://bucket/data/1: access denied'):
            fetcher.advance(1)
