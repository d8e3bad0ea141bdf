"""Tests batches of data in preparation: they equal those of the complete data, and wait for their shards."""

import itertools
import pickle
import tempfile
import threading
from functools import partial

import numpy as np
import pytest

from maxlm.cli.setup import prepare
from maxlm.config.schema import DataConfig
from maxlm.data.dataset.preparation import PARTIAL_MANIFEST
from maxlm.data.dataset.records import load_manifest
from maxlm.data.loader import growing, source
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.data.loader.growing import GrowingBatches, WaitHooks
from maxlm.errors import InputError
from tests.stepped_preparation import stepped, write_lines
from tests.waiting import until

ROWS = 4


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    for module in (growing, source):
        monkeypatch.setattr(module, 'POLL_SECONDS', 0.005)


@pytest.fixture
def texts(tmp_path):
    return write_lines(tmp_path / 'texts')


@pytest.fixture
def preparation(monkeypatch, texts, tmp_path):
    with stepped(monkeypatch, texts, tmp_path / 'data') as preparation:
        preparation.step()
        yield preparation


def open_data(path, **options):
    return open_training_data(DataConfig(path=str(path), seq_len=16, **options))


def growing_batches(corpus):
    return GrowingBatches(corpus, partial(TrainingData.train_batches, global_batch=ROWS))


def num_available(batches):
    """Returns the number of steps that do not wait."""
    return batches._num_steps


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in {*a, *b})


def mixture(tmp_path, texts):
    """Returns the config of a mixture of the data in preparation and a complete data set."""
    options = ['--input', texts, '--output', tmp_path / 'other', '--tokenizer', 'bytes', '--workers', 1, '--quiet']
    assert prepare.main([str(option) for option in options]) == 0
    entries = ((f'{tmp_path}/data', 0.7), (f'{tmp_path}/other', 0.3))
    return {'sources': entries}


@pytest.mark.parametrize('shuffle_shards', [0, 2])
@pytest.mark.parametrize('mixed', [False, True])
def test_batches_during_the_preparation_equal_those_after_it(preparation, tmp_path, texts, shuffle_shards, mixed):
    options = {'shuffle_shards': shuffle_shards, **(mixture(tmp_path, texts) if mixed else {})}
    corpus = open_data(preparation.output, **options)
    assert corpus.training_windows is None
    batches, found, counts = growing_batches(corpus), [], []
    for _ in range(2 if shuffle_shards else 4):
        preparation.step(shuffle_shards or 1)
        batches.wait(len(found))
        counts.append(num_available(batches))
        found += [batches[step] for step in range(len(found), counts[-1])]
    assert len(set(counts)) == len(counts)
    assert preparation.finish() == 0
    complete = open_data(preparation.output, **options)
    assert complete.fingerprint(ROWS) == corpus.fingerprint(ROWS)
    assert complete.training_windows is not None
    expected = complete.train_batches(ROWS)
    assert all(same(batch, expected[step]) for step, batch in enumerate(found))
    assert not same(found[0], expected[1])
    # After the end, the run reads the first epoch to its end, and further epochs in a new order.
    steps = range(len(found), 3 * complete.training_windows // ROWS)
    assert all(same(batches[step], expected[step]) for step in steps)


def test_the_order_within_an_epoch_and_between_epochs(preparation):
    preparation.finish()
    corpus = open_data(preparation.output)
    order = corpus.train_batches(ROWS).order.orders[0]
    counts = corpus.sources[0].windows('train', corpus.data).shard_windows
    assert len(counts) >= 4
    firsts = np.cumsum([0, *counts])
    first = [order[position] for position in range(len(order))]
    # Shards in order, each of them shuffled.
    assert all(sorted(first[a:b]) == list(range(a, b)) for a, b in itertools.pairwise(firsts))
    assert first != sorted(first)
    second = [order[position] for position in range(len(order), 2 * len(order))]
    assert sorted(second) == sorted(first)
    assert max(second[: counts[0]]) >= counts[0]


def test_a_step_waits_for_its_shards(preparation, monkeypatch):
    monkeypatch.setattr(growing, 'REPORT_SECONDS', 0)
    batches = growing_batches(open_data(preparation.output))
    step = num_available(batches)
    read, lines = [], []
    hooks = WaitHooks(lines.append, lambda has_progressed: None)
    # A worker process has its own copy.
    copy = pickle.loads(pickle.dumps(batches))
    threads = [
        threading.Thread(target=lambda: read.append(batches.wait(step, hooks)[step])),
        threading.Thread(target=lambda: read.append(copy[step])),
    ]
    for thread in threads:
        thread.start()
    until(lambda: lines)
    assert all(thread.is_alive() for thread in threads)
    assert lines == [f'step {step + 1} waits for the preparation of {preparation.output}']
    preparation.step()
    for thread in threads:
        thread.join(5)
    assert preparation.finish() == 0
    assert len(read) == 2
    assert all(same(batch, open_data(preparation.output).train_batches(ROWS)[step]) for batch in read)


def test_only_progress_of_the_preparation_counts(preparation, monkeypatch):
    batches = growing_batches(open_data(preparation.output))
    progress, polls, errors = [], [], []
    read_progress = growing.read_progress
    monkeypatch.setattr(growing, 'read_progress', lambda path: (polls.append(1), read_progress(path))[1])

    def wait():
        try:
            batches.wait(10**6, WaitHooks(print, progress.append))
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: len(polls) > 5)
    # The first state counts as progress.
    assert sum(progress) == 1
    preparation.step()
    until(lambda: sum(progress) > 1)
    # The copy of a worker process also stops.
    copy = pickle.loads(pickle.dumps(batches))
    batches.close()
    thread.join(5)
    with pytest.raises(InputError, match='the run has ended'):
        copy[10**6]
    assert errors == ['the run has ended; start it again to continue']


@pytest.mark.parametrize(
    ('error', 'reason'),
    [
        (InputError('texts/5: damaged'), r'failed: texts/5: damaged'),
        (KeyboardInterrupt(), 'was interrupted'),
    ],
)
def test_a_preparation_that_fails_fails_the_step(preparation, error, reason):
    batches = growing_batches(open_data(preparation.output))
    step = num_available(batches)
    preparation.stop(error)
    # Shards that are complete can still be used.
    assert batches[step - 1]['tokens'].shape == (ROWS, 16)
    message = rf'step {step + 1} needs more data, but the preparation of {preparation.output} {reason};'
    with pytest.raises(InputError, match=message):
        batches[step]
    # A killed preparation announces no reason.
    (preparation.output / '.preparing.json').unlink()
    with pytest.raises(InputError, match=f'{preparation.output} has stopped;'):
        batches[step]


def test_a_resumed_preparation_continues_the_same_shards(preparation, monkeypatch, texts):
    batches = growing_batches(open_data(preparation.output))
    preparation.step(2)
    preparation.stop(KeyboardInterrupt())
    before = load_manifest(preparation.output, name=PARTIAL_MANIFEST)
    step = num_available(batches)
    first = batches[0]
    with stepped(monkeypatch, texts, preparation.output) as again:
        assert same(batches[0], first)
        assert same(batches[step], growing_batches(open_data(preparation.output))[step])
        assert again.finish() == 0
    after = load_manifest(preparation.output)
    count = len(before.splits['train'].shards)
    assert count == 3
    assert after.splits['train'].shards[:count] == before.splits['train'].shards
    assert same(open_data(preparation.output).train_batches(ROWS)[step], batches[step])


def test_replaced_data_is_an_error(preparation, monkeypatch, tmp_path):
    batches = growing_batches(open_data(preparation.output))
    preparation.stop(KeyboardInterrupt())
    (preparation.output / PARTIAL_MANIFEST).unlink()
    with stepped(monkeypatch, write_lines(tmp_path / 'others', seed=1), preparation.output) as other:
        other.step(2)
        with pytest.raises(InputError, match='was prepared from other data since the run started'):
            batches[num_available(batches)]


def test_opening_waits_for_the_first_shard(monkeypatch, texts, tmp_path):
    with pytest.raises(InputError, match='contains no data set'):
        open_data(tmp_path / 'data')
    monkeypatch.setattr(source, 'REPORT_SECONDS', 0)
    with stepped(monkeypatch, texts, tmp_path / 'data') as preparation:
        opened, lines = [], []
        config = DataConfig(path=str(tmp_path / 'data'), seq_len=16)
        thread = threading.Thread(target=lambda: opened.append(open_training_data(config, on_warning=lines.append)))
        thread.start()
        until(lambda: lines)
        assert thread.is_alive()
        preparation.step()
        thread.join(5)
        assert len(opened[0].sources[0].shards('train')) == 1
        assert lines == [f'waiting for the preparation of {tmp_path}/data']


def test_opening_reports_a_preparation_that_failed_before_its_first_shard(monkeypatch, texts, tmp_path):
    with stepped(monkeypatch, texts, tmp_path / 'data') as preparation:
        preparation.stop(InputError('texts/5: damaged'))
    with pytest.raises(InputError, match=r'the preparation of .*data failed: texts/5: damaged; correct this'):
        open_data(tmp_path / 'data')
