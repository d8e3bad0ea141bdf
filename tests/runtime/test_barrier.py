"""Tests barriers and save transactions of processes, with a fake of the store of JAX's coordination service."""

import concurrent.futures
import threading

import pytest

from maxlm.runtime import barrier
from maxlm.runtime.barrier import PeerError, ProcessGroup, SaveTransaction, agree


class Store:
    """Fake store of keys and values, which records barriers."""

    def __init__(self):
        self.values, self.barriers = {}, []
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            # The real store rejects an existing key.
            assert key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 10)
            return self.values[key]

    def key_value_delete(self, folder):
        assert folder.endswith('/')
        for key in [key for key in self.values if key.startswith(folder)]:
            del self.values[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def wait_at_barrier(self, name, timeout_ms):
        self.barriers.append(name)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(barrier, '_client', lambda: store)
    monkeypatch.setattr(ProcessGroup, '_num_barriers', 0)
    monkeypatch.setattr(ProcessGroup, '_num_saves', 0)
    return store


def make_group(monkeypatch, process, count=2):
    monkeypatch.setattr('jax.process_index', lambda: process)
    monkeypatch.setattr('jax.process_count', lambda: count)
    return ProcessGroup()


def barriers(*transactions):
    """Returns the errors of processes that reach the barrier at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(transactions)) as pool:
        futures = [pool.submit(transaction.barrier, key='any', timeout_ms=5000) for transaction in transactions]
        return [future.exception() for future in futures]


def test_single_process_does_not_communicate(store, monkeypatch):
    group = make_group(monkeypatch, 0, 1)
    group.barrier()
    assert group.broadcast_from_host0('mine') == 'mine'
    transaction = group.begin_save()
    transaction.barrier(key='any', timeout_ms=0)
    transaction.fail('full')
    assert store.barriers == []
    assert [key for key in store.values if 'failed' in key] == []


def test_all_processes_receive_the_value_of_the_first(store, monkeypatch):
    first = make_group(monkeypatch, 0)
    assert first.broadcast_from_host0('first') == 'first'
    monkeypatch.setattr(ProcessGroup, '_num_barriers', 0)
    assert make_group(monkeypatch, 1).broadcast_from_host0('second') == 'first'
    assert store.barriers == ['maxlm/checkpoints/1/barrier'] * 2
    # A broadcast value is removed once all processes have passed a later barrier.
    first.barrier()
    assert store.values == {}


def test_new_save_clears_the_previous_one(store, monkeypatch):
    first = make_group(monkeypatch, 0)
    first.begin_save().fail('full')
    assert list(store.values) == ['maxlm/saves/1/failed/0']
    transaction = first.begin_save()
    assert store.values == {}
    transaction.fail('full again')
    assert store.values == {'maxlm/saves/2/failed/0': 'process 0: full again'}


def test_all_processes_wait_at_two_barriers(store):
    transactions = [SaveTransaction('save', number, 3) for number in range(3)]
    for phase in (1, 2):
        assert barriers(*transactions) == [None] * 3
        assert f'save/{phase}/all/go' in store.values
    # Control: the barrier times out for one of three processes.
    with pytest.raises(PeerError, match='did not finish in time'):
        transactions[0].barrier(key='any', timeout_ms=30)


def test_failure_of_one_process_is_raised_in_all(store):
    transactions = [SaveTransaction('save', number, 3) for number in range(3)]
    transactions[1].fail('No space left')
    for error in barriers(transactions[0], transactions[2]):
        assert isinstance(error, PeerError)
        assert str(error) == 'process 1: No space left'


def test_all_processes_see_a_problem_of_one(store, monkeypatch):
    monkeypatch.setattr(barrier, 'VOTE_SECONDS', 10)
    assert agree('one process needs no store') == 'one process needs no store'
    for problems in (['', ''], ['', 'bad'], ['bad', ''], ['bad', 'worse']):
        groups = [make_group(monkeypatch, process) for process in range(2)]
        made = iter(groups)
        monkeypatch.setattr(barrier, 'ProcessGroup', lambda made=made: next(made))
        # Both processes of a group are threads here, so the first begins the save for both.
        vote = SaveTransaction('maxlm/saves/' + '|'.join(problems), 0, 2)
        for process, group in enumerate(groups):
            group.begin_save = lambda process=process, vote=vote: SaveTransaction(vote._prefix, process, 2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(agree, problems))
        number = 0 if problems[0] else 1
        expected = [problem or (f'process {number}: bad' if any(problems) else '') for problem in problems]
        assert found == expected


def test_gathered_texts_are_in_the_order_of_the_processes(store, monkeypatch):
    assert ProcessGroup().gather('alone') == ['alone']
    store.key_value_set('maxlm/checkpoints/1/gathered/0', 'first')
    assert make_group(monkeypatch, 1).gather('second') == ['first', 'second']
