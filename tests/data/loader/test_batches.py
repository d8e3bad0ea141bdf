import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from maxlm.config.schema import DataConfig
from maxlm.data.loader.batches import check_same_data, fingerprint_changes, iterate
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.windows import Sequences
from maxlm.errors import InputError

DATA = DataConfig(seq_len=16, seed=3, num_threads=2, prefetch_buffer_size=2)


def train_batches(dataset, data, global_batch, rows=None, **options):
    corpus = open_training_data(dataclasses.replace(data, path=str(dataset.path)))
    return corpus.train_batches(global_batch, rows, **options)


def validation_batches(dataset, data, global_batch, num_batches=0, rows=None):
    corpus = open_training_data(dataclasses.replace(data, path=str(dataset.path)))
    return corpus.validation_batches(global_batch, num_batches, rows)


@pytest.fixture
def dataset(make_dataset, random_shards):
    return make_dataset(random_shards, random_shards[2:])


def row_keys(batch):
    """Returns one hashable value per row."""
    return [row.tobytes() for row in np.concatenate([batch['tokens'], batch['targets']], axis=1)]


def assert_equal(batch, other):
    assert batch.keys() == other.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


def test_each_epoch_has_every_window_once_in_a_new_order(dataset):
    windows = Sequences(dataset, 'train', DATA.seq_len)
    count = len(windows)
    global_batch = 5
    assert count % global_batch  # so a batch crosses the end of an epoch
    batches = train_batches(dataset, DATA, global_batch)
    rows = list(itertools.chain.from_iterable(row_keys(batches[step]) for step in range(3 * count // global_batch)))
    expected = sorted(row_keys({name: np.stack([windows[i][name] for i in range(count)]) for name in windows[0]}))
    assert len(set(expected)) == count
    first, second = rows[:count], rows[count : 2 * count]
    assert sorted(first) == expected
    assert sorted(second) == expected
    assert first != second
    assert first != row_keys({name: np.stack([windows[i][name] for i in range(count)]) for name in windows[0]})


def test_the_order_depends_on_the_seed(dataset):
    same = train_batches(dataset, DATA, 8)[0]
    assert_equal(train_batches(dataset, DATA, 8)[0], same)
    other = train_batches(dataset, DataConfig(seq_len=16, seed=99), 8)[0]
    assert row_keys(other) != row_keys(same)


@pytest.mark.parametrize('hosts', [1, 2, 4, 8])
def test_batches_of_all_hosts_make_the_global_batch(dataset, hosts):
    global_batches = train_batches(dataset, DATA, 8)
    share = 8 // hosts
    parts = [train_batches(dataset, DATA, 8, slice(h * share, (h + 1) * share)) for h in range(hosts)]
    for step in (0, 1, 7):
        joined = {name: np.concatenate([part[step][name] for part in parts]) for name in global_batches[step]}
        assert_equal(joined, global_batches[step])
    swapped = np.concatenate([part[0]['tokens'] for part in reversed(parts)])
    assert hosts == 1 or (swapped != global_batches[0]['tokens']).any()


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_order_does_not_depend_on_workers_or_start(dataset, workers):
    data = DataConfig(seq_len=16, seed=3, num_threads=2, prefetch_buffer_size=2, num_workers=workers)
    batches = train_batches(dataset, data, 4)
    # The steps cover several epochs.
    assert 4 * len(Sequences(dataset, 'train', 16)) < 4 * 55
    seen = list(iterate(batches, 5, data, 60))
    assert len(seen) == 55
    for step, batch in enumerate(seen, start=5):
        assert_equal(batch, batches[step])
    assert row_keys(seen[0]) != row_keys(batches[0])


def test_start_at_any_step(dataset):
    batches = train_batches(dataset, DATA, 4)
    for start in range(0, 20):
        with_start = iterate(batches, start, DATA)
        assert_equal(next(with_start), batches[start])
        with_start.close()


@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_damage_raises_an_error(dataset, workers):
    data = DataConfig(seq_len=16, seed=3, num_threads=2, prefetch_buffer_size=2, num_workers=workers)
    batches = train_batches(dataset, data, 4)
    (dataset.path / 'train-00000.arrayrecord').unlink()
    with pytest.raises(InputError, match=r'train-00000\.arrayrecord'):
        list(iterate(batches, 0, data, 10))


@pytest.mark.multiprocess
@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGINT])
def test_signals_of_the_terminal_do_not_reach_workers(dataset, number):
    data = DataConfig(seq_len=16, num_workers=1)
    batches = iterate(train_batches(dataset, data, 4), 0, data, 8)
    with contextlib.closing(batches):
        next(batches)
        # The terminal sends them to all processes of its foreground group.
        for process in multiprocessing.active_children():
            os.kill(process.pid, number)
        assert len(list(batches)) == 7
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.multiprocess
def test_a_closed_iterator_leaves_no_process(dataset):
    data = DataConfig(seq_len=16, num_workers=1)
    iterator = iterate(train_batches(dataset, data, 4), 0, data)
    next(iterator)
    assert multiprocessing.active_children()
    iterator.close()
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def test_validation_has_every_window_once_with_padding(dataset):
    windows = Sequences(dataset, 'validation', 16)
    batches = validation_batches(dataset, DATA, 5)
    assert len(windows) % 5
    assert len(batches) == -(-len(windows) // 5)
    rows = [{name: batch[name][r] for name in batch} for batch in iterate(batches, 0, DATA) for r in range(5)]
    real, padding = rows[: len(windows)], rows[len(windows) :]

    def content(row):
        return tuple(values.tobytes() for values in row.values())

    assert sorted(map(content, real)) == sorted(content(windows[i]) for i in range(len(windows)))
    assert not any(values.any() for row in padding for values in row.values())
    # A part of the split is a random sample instead of its start, and its order does not depend on the run.
    assert [content(row) for row in real] != [content(windows[i]) for i in range(len(windows))]
    other = validation_batches(dataset, DataConfig(seq_len=16, seed=99), 5)
    assert_equal(other[0], batches[0])
    assert rows[0]['weights'].any()
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_num_batches_limits_validation(dataset):
    batches = validation_batches(dataset, DATA, 4)
    assert len(validation_batches(dataset, DATA, 4, 2)) == 2
    assert len(validation_batches(dataset, DATA, 4, 10**6)) == len(batches)
    assert_equal(validation_batches(dataset, DATA, 4, 2, slice(2, 4))[1], {n: v[2:] for n, v in batches[1].items()})


def test_an_empty_split_is_named(make_dataset, random_shards):
    with pytest.raises(InputError, match='validation split is empty'):
        validation_batches(make_dataset(random_shards), DATA, 4)


@pytest.mark.parametrize('count', [1, 2, 3])
def test_fewer_windows_than_rows(make_dataset, count):
    dataset = make_dataset([[[7]] * count], block=8)
    batch = train_batches(dataset, DataConfig(seq_len=2), 8)[0]
    assert batch['tokens'].shape == (8, 2)
    assert len(set(row_keys(batch))) <= len(Sequences(dataset, 'train', 2))


@pytest.mark.parametrize(
    ('num_steps', 'all_hosts', 'all_workers'),
    [(100, (2, 8), ()), pytest.param(1000, (2, 4, 8), (1, 4), marks=pytest.mark.nightly)],
)
def test_the_first_batches_on_any_number_of_hosts_and_workers(
    make_dataset, random_shards, num_steps, all_hosts, all_workers
):
    """Compares global batches as sets over many epochs, with another seed as negative control."""
    dataset = make_dataset(random_shards)

    def digests(hosts, data):
        share = 8 // hosts
        parts = [
            iterate(train_batches(dataset, data, 8, slice(h * share, (h + 1) * share)), 0, data, num_steps)
            for h in range(hosts)
        ]
        return [frozenset(itertools.chain.from_iterable(map(row_keys, step))) for step in zip(*parts, strict=True)]

    expected = digests(1, DATA)
    assert len(expected) == num_steps
    assert len(set(expected)) > 0.99 * num_steps
    for hosts in all_hosts:
        assert digests(hosts, DATA) == expected
    for workers in all_workers:
        assert digests(1, dataclasses.replace(DATA, num_workers=workers)) == expected
    assert digests(1, dataclasses.replace(DATA, seed=4)) != expected


def test_resuming_twice_across_an_epoch(dataset):
    batches = train_batches(dataset, DATA, 4)
    per_epoch = len(Sequences(dataset, 'train', 16)) // 4
    expected = [row_keys(batch) for batch in iterate(batches, 0, DATA, 3 * per_epoch)]
    for first, second in ((1, per_epoch), (per_epoch - 1, per_epoch + 1), (per_epoch, 2 * per_epoch)):
        ranges = [(0, first), (first, second), (second, 3 * per_epoch)]
        resumed = [row_keys(batch) for start, stop in ranges for batch in iterate(batches, start, DATA, stop)]
        assert resumed == expected
    assert expected[:per_epoch] != expected[per_epoch : 2 * per_epoch]


def test_batches_are_picklable(dataset):
    batches = train_batches(dataset, DATA, 4)
    assert_equal(pickle.loads(pickle.dumps(batches))[3], batches[3])


def test_a_context_schedule_keeps_tokens_and_their_order(dataset):
    unsplit = train_batches(dataset, DATA, 4)
    schedule = ((0, 4), (3, 2), (7, 1))
    split = train_batches(dataset, DATA, 4, seq_len_schedule=schedule)
    for step in range(10):
        parts = 4 if step < 3 else 2 if step < 7 else 1
        assert split[step]['tokens'].shape == (4 * parts, 16 // parts)
        for name in ('tokens', 'targets', 'weights'):
            np.testing.assert_array_equal(split[step][name].reshape(4, 16), unsplit[step][name])
    assert split[0]['positions'].max() < 4 <= unsplit[0]['positions'].max()
    # The rows of a host are those of its own sequences.
    second = train_batches(dataset, DATA, 4, slice(2, 4), seq_len_schedule=schedule)
    assert_equal(second[1], {name: rows[8:] for name, rows in split[1].items()})


@pytest.mark.parametrize('sizes', [(4, 6), (4, 1, 9)])
def test_no_sequence_is_repeated_or_left_out_after_a_change_of_the_batch_size(dataset, sizes):
    changes = tuple((3 * number, 3 * number, size) for number, size in enumerate(sizes))
    expected, found = train_batches(dataset, DATA, 1), []
    for stage, size in enumerate(sizes):
        # A process reads only batches of the present size.
        batches = train_batches(dataset, DATA, size, batch_sizes=changes[: stage + 1] if stage else ())
        for step in range(3 * stage, 3 * stage + 3):
            assert batches[step]['tokens'].shape == (size, 16)
            found += row_keys(batches[step])
    assert found == [key for row in range(3 * sum(sizes)) for key in row_keys(expected[row])]
    # Negative control: without the earlier sizes, sequences are repeated or left out.
    assert row_keys(train_batches(dataset, DATA, sizes[-1])[step]) != found[-sizes[-1] :]


def test_changes_of_the_fingerprint_are_named():
    stored = {'window': 16, 'global_batch': 8, 'seed': 3}
    assert fingerprint_changes(stored, dict(stored)) == ''
    changes = fingerprint_changes(stored, {'window': 32, 'global_batch': 16, 'seed': 3, 'weight web': 0.5})
    assert changes == 'window was 16 and is 32; global_batch was 8 and is 16; weight web was None and is 0.5'


def test_changed_data_is_refused_unless_allowed():
    check_same_data({'seed': 1}, {'seed': 1}, allow_dataset_change=False)
    with pytest.raises(InputError, match='cannot resume with different data: seed was 1 and is 2'):
        check_same_data({'seed': 1}, {'seed': 2}, allow_dataset_change=False)
    check_same_data({'seed': 1}, {'seed': 2}, allow_dataset_change=True)
