import random

import pytest

from maxlm.data.dataset import cache_policy
from maxlm.data.dataset.cache_policy import CachePolicy, PlannedRead, check_capacity
from maxlm.errors import InputError
from maxlm.storage.download import RemoteFile


@pytest.fixture
def files(tmp_path):
    """Returns ten files of 10 bytes each."""
    return [RemoteFile(f'gs://b/{i}', tmp_path / str(i), 10) for i in range(10)]


def fetch_queue(policy):
    """Downloads the queued files, like the threads of the fetcher; returns their names."""
    names = []
    while policy.queue:
        entry = policy.queue.popleft()
        entry.file.path.write_bytes(bytes(entry.file.bytes))
        entry.state = 'complete'
        names.append(entry.file.path.name)
    return ''.join(names)


def file_names(tmp_path):
    return ''.join(sorted(path.name for path in tmp_path.iterdir()))


def test_files_that_are_no_longer_needed_are_evicted(files, tmp_path):
    policy = CachePolicy(30)
    assert policy.admit(PlannedRead(tuple(files[:2]), 0, 4))
    assert policy.admit(PlannedRead((files[2],), 2, 6))
    assert not policy.admit(PlannedRead((files[3],), 5, 8))
    assert fetch_queue(policy) == '012'
    policy.advance_to(4)
    assert not policy.admit(PlannedRead((files[3],), 5, 8))
    assert file_names(tmp_path) == '012'
    assert policy.next_end == 4
    policy.advance_to(5)
    assert policy.admit(PlannedRead((files[3],), 5, 8))
    # No more files are deleted than necessary.
    assert file_names(tmp_path) == '12'
    assert fetch_queue(policy) == '3'
    assert policy.next_end == 6


def test_files_that_are_needed_again_are_kept(files, tmp_path):
    policy = CachePolicy(30)
    assert policy.admit(PlannedRead(tuple(files[:2]), 0, 1))
    assert policy.admit(PlannedRead((files[0],), 2, 3))
    assert fetch_queue(policy) == '01'
    policy.advance_to(2)
    assert policy.admit(PlannedRead((files[2], files[3]), 4, 5))
    assert file_names(tmp_path) == '0'
    assert fetch_queue(policy) == '23'


def test_without_a_limit_no_file_is_evicted_and_the_plan_is_bounded(files, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_policy, 'MAX_PLANNED', 5)
    policy = CachePolicy(0)
    admitted = 0
    for step in range(10):
        while policy.admit(PlannedRead((files[admitted % 10],), admitted, admitted)):
            admitted += 1
        assert admitted == step + 5
        fetch_queue(policy)
        policy.advance_to(step + 1)
    assert file_names(tmp_path) == '0123456789'


def test_files_of_an_earlier_run_count_and_are_evicted_first(files, tmp_path):
    files[7].path.write_bytes(bytes(10))
    files[8].partial.write_bytes(bytes(3))
    files[1].path.write_bytes(bytes(10))
    files[0].path.write_bytes(b'another size')
    policy = CachePolicy(20)
    for file in files:
        policy.register(file)
    # A file of the wrong size is deleted immediately, so that it is not read and does not count toward the limit.
    assert file_names(tmp_path) == '.8.partial17'
    assert policy.admit(PlannedRead(tuple(files[:2]), 0, 0))
    assert file_names(tmp_path) == '1'
    assert fetch_queue(policy) == '0'


def test_files_that_are_being_fetched_are_not_evicted(files):
    policy = CachePolicy(20)
    assert policy.admit(PlannedRead(tuple(files[:2]), 0, 0))
    entry = policy.queue.popleft()
    entry.state = 'fetching'
    policy.advance_to(1)
    assert not policy.admit(PlannedRead(tuple(files[2:4]), 1, 1))
    # Downloads that have not started are canceled.
    assert [entry.file.path.name for entry in policy.queue] == []
    entry.state = 'complete'
    assert policy.admit(PlannedRead(tuple(files[2:4]), 1, 1))


def test_deleted_files_are_fetched_again_while_they_are_needed(files):
    policy = CachePolicy(0)
    assert policy.admit(PlannedRead((files[0],), 0, 0))
    assert policy.admit(PlannedRead((files[1],), 0, 5))
    fetch_queue(policy)
    policy.requeue_vanished()
    assert not policy.queue
    policy.advance_to(1)
    files[0].path.unlink()
    files[1].path.unlink()
    assert policy.admit(PlannedRead((files[2],), 3, 3))
    policy.requeue_vanished()
    # This file is downloaded before files that are needed later.
    assert fetch_queue(policy) == '12'


def test_a_step_whose_files_exceed_the_capacity_is_rejected(files):
    reads = [
        PlannedRead((files[0],), 0, 9),
        PlannedRead((files[1],), 0, 3),
        PlannedRead((files[1], files[2]), 4, 6),
        PlannedRead((files[3],), 5, 9),
    ]
    check_capacity(reads, 40)
    with pytest.raises(InputError, match=r'cache of 39 bytes is too small: step 5 reads files of 40 bytes'):
        check_capacity(reads, 39)
    policy = CachePolicy(39)
    assert all(policy.admit(read) for read in reads[:2])
    fetch_queue(policy)
    policy.advance_to(4)
    assert policy.admit(reads[2])
    fetch_queue(policy)
    # This is not an error yet, because space may become available.
    assert not policy.admit(reads[3])
    policy.advance_to(5)
    with pytest.raises(InputError, match='too small: step 5 reads files of 40 bytes'):
        policy.admit(reads[3])


def test_random_orders_keep_the_limit_and_make_progress(files, tmp_path):
    rng = random.Random(3)
    for _ in range(50):
        reads, step = [], 0
        for _ in range(30):
            reads.append(PlannedRead(tuple(rng.sample(files, rng.randrange(1, 4))), step, step + rng.randrange(4)))
            step += rng.randrange(3)
        capacity = next(size for size in range(10, 200, 10) if fits(reads, size))
        policy, pending = CachePolicy(capacity), list(reads)
        for file in files:
            policy.register(file)
        for step in range(reads[-1].last_step + 1):
            policy.advance_to(step)
            while pending and policy.admit(pending[0]):
                fetch_queue(policy)
                del pending[0]
                assert len(file_names(tmp_path)) * 10 <= capacity
            for read in reads:
                if read.first_step <= step <= read.last_step:
                    assert all(file.is_complete for file in read.files)
        assert not pending


def fits(reads, capacity):
    try:
        check_capacity(reads, capacity)
    except InputError:
        return False
    return True
