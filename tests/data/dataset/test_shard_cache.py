"""Fetching ahead of use: a training process and its readers, with a bucket on loopback that fails."""

from __future__ import annotations

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
from tests.buckets import gcs as gcs_buckets
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
    print('there')
except InputError as error:
    print(error)
assert 'fsspec' not in sys.modules
"""


@pytest.fixture
def gcs(monkeypatch):
    with gcs_buckets.running(monkeypatch) as server:
        for number, content in enumerate(CONTENTS):
            server.put('bucket', f'data/{number}', content)
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download, 'CHUNK_BYTES', 300)
    monkeypatch.setattr(download, 'LOCK_POLL_SECONDS', 0.001)
    monkeypatch.setattr('maxlm.data.dataset.wait.POLL_SECONDS', 0.001)


def each_epoch(files, steps_each=2):
    """Every file for some steps, in order, again and again."""
    for number in itertools.count():
        yield PlannedRead((files[number % len(files)],), number * steps_each, (number + 1) * steps_each - 1)


def cached(files):
    return [number for number, file in enumerate(files) if file.is_there]


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


def test_all_is_fetched_in_parallel_and_once(gcs, files, alarms):
    """The last file is not answered before another was begun after it: two are on their way at the same time."""
    held = gcs.fault('hold', match='data/0', times=1)
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=alarms.append, threads=4):
        assert held.reached.wait(60)
        for file, content in list(zip(files, CONTENTS, strict=True))[1:]:
            assert read(file) == content
        assert not files[0].is_there
        held.released.set()
        assert read(files[0]) == CONTENTS[0]
    assert len(gcs.asked()) == 4 * len(files)
    with Fetcher(each_epoch(files), on_warning=alarms.append) as fetcher:
        for step in range(50):
            fetcher.advance(step)
            assert read(files[step // 2 % 8]) == CONTENTS[step // 2 % 8]
    assert len(gcs.asked()) == 4 * len(files)
    assert alarms == []
    assert sorted(path.name for path in files[0].path.parent.iterdir()) == sorted(['.fetching', *'01234567'])


@pytest.mark.parametrize('capacity', [1000, 2000, 3500])
def test_the_disk_is_bounded_at_all_times(gcs, files, alarms, capacity):
    usage = []
    with Fetcher(
        each_epoch(files),
        capacity_bytes=capacity,
        on_warning=alarms.append,
        all_files=files,
        on_bytes=lambda added: usage.append(disk_usage(files)),
    ) as fetcher:
        for step in range(48):
            fetcher.advance(step)
            number = step // 2 % 8
            assert read(files[number]) == CONTENTS[number]
            usage.append(disk_usage(files))
            # What is used now and next is not what goes.
            assert files[number].is_there
    assert max(usage) <= capacity
    assert max(usage) > capacity - SIZE
    assert len(gcs.asked()) >= 3 * 8 * 4 - 4
    assert alarms == []
    # Control: without the limit all of it stays.
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=alarms.append):
        for file in files:
            wait_for_file(file.path)
    assert disk_usage(files) == 8 * SIZE


def test_a_file_that_is_open_can_be_read_after_it_went(gcs, files, alarms):
    with Fetcher(each_epoch(files, 1), capacity_bytes=SIZE, on_warning=alarms.append) as fetcher:
        wait_for_file(files[0].path)
        with files[0].path.open('rb') as opened:
            fetcher.advance(1)
            wait_for_file(files[1].path)
            assert not files[0].path.exists()
            assert opened.read() == CONTENTS[0]


def test_the_next_run_goes_on_and_makes_room_of_what_was_left(gcs, files, alarms):
    with Fetcher([PlannedRead(tuple(files[:3]), 0, 0)], on_warning=alarms.append):
        for file in files[:3]:
            wait_for_file(file.path)
    files[3].partial.write_bytes(CONTENTS[3][:600])
    gcs.requests.clear()
    with Fetcher(
        [PlannedRead((files[0], files[3]), 0, 0)], capacity_bytes=2000, on_warning=alarms.append, all_files=files
    ):
        assert read(files[3]) == CONTENTS[3]
    assert cached(files) == [0, 3]
    assert [(one.name, one.start) for one in gcs.asked()] == [('data/3', 600), ('data/3', 900)]


def test_a_vanished_bucket_raises_an_alarm_and_training_goes_on_with_what_is_cached(gcs, files, alarms):
    waits = queue.SimpleQueue()
    proceed = threading.Semaphore(0)

    def wait(seconds):
        waits.put(seconds)
        proceed.acquire()

    with Fetcher(
        each_epoch(files), capacity_bytes=2000, threads=1, on_warning=alarms.append, all_files=files, wait=wait
    ) as fetcher:
        wait_for_file(files[0].path)
        wait_for_file(files[1].path)
        gcs.vanish()
        # It is not needed yet: steps 0 … 3 go on.
        for step in range(4):
            fetcher.advance(step)
            assert read(files[step // 2]) == CONTENTS[step // 2]
        delays = []
        for _ in range(9):
            delays.append(waits.get())
            proceed.release()
        assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert alarms == [
            f'gs://bucket/data/2: no answer (Connection refused); failure{again}, retrying in {seconds} s'
            for again, seconds in (('', 1), (' 2 in a row', 2), (' 4 in a row', 8), (' 8 in a row', 60))
        ]
        # Somebody may wait for it all the while.
        reader = threading.Thread(target=wait_for_file, args=(files[2].path,))
        reader.start()
        waits.get()
        assert not files[2].is_there
        gcs.appear()
        proceed.release(100)
        reader.join()
        assert read(files[2]) == CONTENTS[2]
        assert alarms[4:] == ['gs://bucket/data/2: the bucket responds again']
        fetcher.advance(4)
        assert read(files[3]) == CONTENTS[3]


@pytest.mark.parametrize(
    ('kind', 'reason'), [(403, 'access denied'), (404, 'No such file'), ('flip', 'download damaged in two attempts')]
)
def test_who_waits_for_a_file_that_cannot_be_had_is_told_why(gcs, files, alarms, kind, reason):
    gcs.fault(kind, match='data/1')
    with Fetcher([PlannedRead((file,), step, step) for step, file in enumerate(files)], on_warning=alarms.append):
        with pytest.raises(InputError, match=rf'^gs://bucket/data/1: {reason}'):
            wait_for_file(files[1].path)
        # The others are not concerned.
        assert read(files[2]) == CONTENTS[2]
    assert len(alarms) == 1
    # The next start knows nothing of it.
    gcs.faults.clear()
    with Fetcher([], all_files=files, on_warning=alarms.append):
        pass
    assert not list(files[0].path.parent.glob('.*.failed'))
    with Fetcher([PlannedRead((files[1],), 0, 0)], on_warning=alarms.append):
        assert read(files[1]) == CONTENTS[1]
    assert len(alarms) == 1


def start_reader(path):
    process = subprocess.Popen(
        [sys.executable, '-c', WAIT, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'waiting\n'
    return process


def output_of(process):
    # Not `communicate`: it does not know of what was read ahead with the first line.
    with process:
        assert process.stderr.read() == ''
        return process.stdout.read()


@pytest.mark.multiprocess
def test_readers_in_other_processes_wait(gcs, files, alarms):
    """Slow: it starts three processes, one after another."""
    held = gcs.fault('hold', match='data/0')
    gcs.fault(403, match='data/1')
    missing = files[0].path.parent / 'x'
    with Fetcher([PlannedRead((file,), 0, 0) for file in files], on_warning=alarms.append) as fetcher:
        assert held.reached.wait(60)
        process = start_reader(files[0].path)
        held.released.set()
        assert output_of(process) == 'there\n'
        assert output_of(start_reader(files[1].path)).startswith('gs://bucket/data/1: access denied')
        process = start_reader(missing)
        assert process.poll() is None
        fetcher.close()
        assert output_of(process) == f'{missing} is missing, and no process is fetching it\n'


def test_closing_ends_the_waiting_of_threads(gcs, files, alarms):
    gcs.fault(503)
    raised = queue.SimpleQueue()

    def reader():
        try:
            wait_for_file(files[0].path)
        except InputError as error:
            raised.put(str(error))

    fetcher = Fetcher(each_epoch(files), on_warning=alarms.append)
    with fetcher:
        thread = threading.Thread(target=reader)
        thread.start()
    thread.join()
    assert raised.get() == f'{files[0].path} is missing, and no process is fetching it'
    # That it was closed is no news of the bucket.
    assert not any('answers again' in alarm for alarm in alarms)


def test_a_local_file_needs_nobody(tmp_path):
    (tmp_path / 'there').touch()
    wait_for_file(tmp_path / 'there')
    with pytest.raises(InputError, match='missing is missing, and no process is fetching it'):
        wait_for_file(tmp_path / 'missing')


def test_two_fetchers_share_a_directory(gcs, files, alarms):
    with (
        Fetcher(each_epoch(files), on_warning=alarms.append) as one,
        Fetcher(each_epoch(files[::-1]), on_warning=alarms.append) as other,
    ):
        for step in range(16):
            one.advance(step)
            other.advance(step)
            assert read(files[step // 2]) == CONTENTS[step // 2]
            assert read(files[7 - step // 2]) == CONTENTS[7 - step // 2]
    assert len(gcs.asked()) == 4 * len(files)
    assert alarms == []


def test_what_another_deletes_is_fetched_again(gcs, files, alarms, monkeypatch):
    monkeypatch.setattr(shard_cache, 'RECHECK_SECONDS', 0.01)
    with Fetcher([PlannedRead(tuple(files), 0, 0)], on_warning=alarms.append):
        for file in files:
            wait_for_file(file.path)
        files[4].path.unlink()
        assert read(files[4]) == CONTENTS[4]


def test_a_limit_that_is_too_small_is_refused(files, alarms):
    uses = [PlannedRead((files[0],), 0, 5), PlannedRead((files[1],), 0, 1), PlannedRead((files[2], files[1]), 2, 4)]
    with pytest.raises(InputError, match=r'a cache of 2,999 bytes is too small: step 2 reads files of 3,000 bytes'):
        Fetcher(uses, capacity_bytes=2999, on_warning=alarms.append)
    Fetcher(uses, capacity_bytes=3000, on_warning=alarms.append)


def test_a_limit_that_turns_out_too_small_is_told_to_readers(gcs, files, alarms, monkeypatch):
    monkeypatch.setattr(shard_cache, 'CHECKED_USES', 1)
    uses = [PlannedRead((files[0],), 0, 5), PlannedRead((files[1],), 1, 1)]
    with Fetcher(uses, capacity_bytes=1500, on_warning=alarms.append) as fetcher:
        wait_for_file(files[0].path)
        fetcher.advance(1)
        fetcher._wake.set()
        with pytest.raises(InputError, match='a cache of 1,500 bytes is too small: step 1 reads files of 2,000 bytes'):
            wait_for_file(files[1].path)


def test_an_order_that_fails_ends_the_waiting(gcs, files, alarms, monkeypatch):
    monkeypatch.setattr(shard_cache, 'CHECKED_USES', 1)
    monkeypatch.setattr(threading, 'excepthook', lambda _: None)

    def uses():
        yield PlannedRead((files[0],), 0, 0)
        raise ArithmeticError('beyond its end')

    with Fetcher(uses(), all_files=files, on_warning=alarms.append) as fetcher:
        with pytest.raises(InputError, match='no process is fetching it'):
            wait_for_file(files[1].path)
        with pytest.raises(InputError, match='cannot determine which files to fetch: ArithmeticError: beyond its end'):
            fetcher.advance(1)


def test_a_cache_that_cannot_be_written_is_named(gcs, files, alarms, tmp_path, monkeypatch):
    (tmp_path / 'cache').write_text('a file')
    with pytest.raises(InputError, match=r'cache: .*; use a writable cache directory'):
        Fetcher([PlannedRead((files[0],), 0, 0)], on_warning=alarms.append).__enter__()
    (tmp_path / 'cache').unlink()

    def full(path, content, **_):
        raise InputError(f'{path}: cannot be written: No space left on device')

    monkeypatch.setattr(shard_cache, 'atomic_write', full)
    gcs.fault(403, match='data/1')
    # Where not even the reason can be written nobody waits for it.
    with Fetcher([PlannedRead((files[1],), 0, 0)], on_warning=alarms.append) as fetcher:
        with pytest.raises(InputError, match='no process is fetching it'):
            wait_for_file(files[1].path)
        with pytest.raises(InputError, match='No space left on device; gs://bucket/data/1: access denied'):
            fetcher.advance(1)
