from __future__ import annotations

import random

import pytest

from maxlm.data.dataset import cache_policy as room_module
from maxlm.data.dataset.cache_policy import CachePolicy, PlannedRead, check_capacity
from maxlm.errors import InputError
from maxlm.storage.download import RemoteFile


@pytest.fixture
def files(tmp_path):
    """Returns ten files of 10 bytes each."""
    return [RemoteFile(f'gs://b/{i}', tmp_path / str(i), 10) for i in range(10)]


def fetch_queue(room):
    """Downloads the queued files instead of the threads."""
    names = []
    while room.queue:
        held = room.queue.popleft()
        held.file.path.write_bytes(bytes(held.file.bytes))
        held.state = 'there'
        names.append(held.file.path.name)
    return ''.join(names)


def there(tmp_path):
    return ''.join(sorted(path.name for path in tmp_path.iterdir()))


def test_room_is_made_of_what_is_used_up(files, tmp_path):
    room = CachePolicy(30)
    assert room.admit(PlannedRead(tuple(files[:2]), 0, 4))
    assert room.admit(PlannedRead((files[2],), 2, 6))
    assert not room.admit(PlannedRead((files[3],), 5, 8))
    assert fetch_queue(room) == '012'
    room.advance_to(4)
    assert not room.admit(PlannedRead((files[3],), 5, 8))
    assert there(tmp_path) == '012'
    assert room.next_end == 4
    room.advance_to(5)
    assert room.admit(PlannedRead((files[3],), 5, 8))
    # Only the required files are deleted.
    assert there(tmp_path) == '12'
    assert fetch_queue(room) == '3'
    assert room.next_end == 6


def test_what_is_used_again_stays(files, tmp_path):
    room = CachePolicy(30)
    assert room.admit(PlannedRead(tuple(files[:2]), 0, 1))
    assert room.admit(PlannedRead((files[0],), 2, 3))
    assert fetch_queue(room) == '01'
    room.advance_to(2)
    assert room.admit(PlannedRead((files[2], files[3]), 4, 5))
    assert there(tmp_path) == '0'
    assert fetch_queue(room) == '23'


def test_without_a_limit_nothing_goes_and_the_plan_has_an_end(files, tmp_path, monkeypatch):
    monkeypatch.setattr(room_module, 'MAX_PLANNED', 5)
    room = CachePolicy(0)
    admitted = 0
    for step in range(10):
        while room.admit(PlannedRead((files[admitted % 10],), admitted, admitted)):
            admitted += 1
        assert admitted == step + 5
        fetch_queue(room)
        room.advance_to(step + 1)
    assert there(tmp_path) == '0123456789'


def test_what_an_earlier_run_left_counts_and_goes_first(files, tmp_path):
    files[7].path.write_bytes(bytes(10))
    files[8].partial.write_bytes(bytes(3))
    files[1].path.write_bytes(bytes(10))
    files[0].path.write_bytes(b'another size')
    room = CachePolicy(20)
    for file in files:
        room.register(file)
    # A file with another size is deleted immediately, or it would be read or exceed the limit with the new file.
    assert there(tmp_path) == '.8.partial17'
    assert room.admit(PlannedRead(tuple(files[:2]), 0, 0))
    assert there(tmp_path) == '1'
    assert fetch_queue(room) == '0'


def test_what_is_being_fetched_does_not_go(files):
    room = CachePolicy(20)
    assert room.admit(PlannedRead(tuple(files[:2]), 0, 0))
    held = room.queue.popleft()
    held.state = 'fetching'
    room.advance_to(1)
    assert not room.admit(PlannedRead(tuple(files[2:4]), 1, 1))
    # Downloads that have not started are canceled.
    assert [held.file.path.name for held in room.queue] == []
    held.state = 'there'
    assert room.admit(PlannedRead(tuple(files[2:4]), 1, 1))


def test_what_was_deleted_by_others_is_fetched_again_while_it_is_needed(files):
    room = CachePolicy(0)
    assert room.admit(PlannedRead((files[0],), 0, 0))
    assert room.admit(PlannedRead((files[1],), 0, 5))
    fetch_queue(room)
    room.requeue_vanished()
    assert not room.queue
    room.advance_to(1)
    files[0].path.unlink()
    files[1].path.unlink()
    assert room.admit(PlannedRead((files[2],), 3, 3))
    room.requeue_vanished()
    # This file is downloaded before files that are needed later.
    assert fetch_queue(room) == '12'


def test_a_step_that_can_never_have_its_files_is_refused(files):
    uses = [
        PlannedRead((files[0],), 0, 9),
        PlannedRead((files[1],), 0, 3),
        PlannedRead((files[1], files[2]), 4, 6),
        PlannedRead((files[3],), 5, 9),
    ]
    check_capacity(uses, 40)
    with pytest.raises(InputError, match=r'cache of 39 bytes is too small: step 5 reads files of 40 bytes'):
        check_capacity(uses, 39)
    room = CachePolicy(39)
    assert all(room.admit(use) for use in uses[:2])
    fetch_queue(room)
    room.advance_to(4)
    assert room.admit(uses[2])
    fetch_queue(room)
    # This is not an error yet, because space may become available.
    assert not room.admit(uses[3])
    room.advance_to(5)
    with pytest.raises(InputError, match='too small: step 5 reads files of 40 bytes'):
        room.admit(uses[3])


def test_random_orders_keep_the_limit_and_never_stop(files, tmp_path):
    rng = random.Random(3)
    for _ in range(50):
        uses, step = [], 0
        for _ in range(30):
            uses.append(PlannedRead(tuple(rng.sample(files, rng.randrange(1, 4))), step, step + rng.randrange(4)))
            step += rng.randrange(3)
        capacity = next(size for size in range(10, 200, 10) if fits(uses, size))
        room, pending = CachePolicy(capacity), list(uses)
        for file in files:
            room.register(file)
        for step in range(uses[-1].last_step + 1):
            room.advance_to(step)
            while pending and room.admit(pending[0]):
                fetch_queue(room)
                del pending[0]
                assert len(there(tmp_path)) * 10 <= capacity
            for use in uses:
                if use.first_step <= step <= use.last_step:
                    assert all(file.is_there for file in use.files)
        assert not pending


def fits(uses, capacity):
    try:
        check_capacity(uses, capacity)
    except InputError:
        return False
    return True
