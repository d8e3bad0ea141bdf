"""Tests training data of one or several data sets: weights, names, errors, and the fingerprint in checkpoints."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from maxlm.config.schema import DataConfig
from maxlm.data.loader.dataset import open_training_data
from maxlm.errors import InputError

WINDOW = 4


def documents(first, count):
    """Returns documents of three tokens each; with its end token, each is one sequence of four."""
    return [[first, first + number % 90, first] for number in range(count)]


@pytest.fixture
def datasets(make_dataset):
    """Returns three data sets, whose tokens start at 100 (web), 200 (code, which is small) and 300 (law)."""
    firsts = {'web': (100, 400), 'code': (200, 8), 'law': (300, 100)}
    return {
        name: make_dataset([documents(first, count)], [documents(first, 5)], directory=name)
        for name, (first, count) in firsts.items()
    }


def config(datasets, **weights):
    return DataConfig(
        sources=tuple((str(datasets[name].path), weight) for name, weight in weights.items()), seq_len=WINDOW
    )


def source_digits(batch):
    return batch['tokens'].max(axis=1) // 100


def test_shares_and_sources_of_rows(datasets):
    corpus = open_training_data(config(datasets, web=0.5, code=0.3, law=0.2))
    assert corpus.names == ('web', 'code', 'law')
    batches = corpus.train_batches(64)
    rows = Counter()
    for step in range(32):  # two periods of 1024 rows
        batch = batches[step]
        # The source number matches the tokens of the row.
        np.testing.assert_array_equal(source_digits(batch), batch['sources'] + 1)
        rows.update(batch['sources'].tolist())
    assert [rows[source] for source in range(3)] == pytest.approx([1024, 614, 410], abs=1)
    assert corpus.mixture().rows_taken(2048) == [rows[source] for source in range(3)]


def test_stages_after_a_change_of_the_batch_size_continue_each_source(datasets):
    corpus = open_training_data(config(datasets, web=0.5, law=0.5))
    stages = ((0, (1.0, 0.0)), (2, (0.5, 0.5)), (6, (0.2, 0.8)))
    before = corpus.mixture(8, stages)
    after = corpus.mixture(16, stages, ((0, 0, 8), (4, 4, 16)))
    # 32 sequences are read in batches of 8. The last stage begins two batches of 16 later instead of two of 8.
    assert [before[row] for row in range(32)] == [after[row] for row in range(32)]
    positions = [[], []]
    for row in range(200):
        source, position = after[row]
        positions[source].append(position)
    assert [list(range(len(of_source))) for of_source in positions] == positions
    assert [corpus.mixture(16, stages)[row] for row in range(32)] != [after[row] for row in range(32)]


def test_each_epoch_of_a_source_has_every_window_once(datasets):
    corpus = open_training_data(config(datasets, web=0.5, code=0.5))
    batches = corpus.train_batches(8)
    rows = [row.tobytes() for step in range(20) for row in batches[step]['tokens'][batches[step]['sources'] == 1]]
    windows = corpus.sources[1].windows('train', corpus.data)
    expected = sorted(windows[number]['tokens'].tobytes() for number in range(len(windows)))
    count = len(windows)
    for epoch in range(len(rows) // count):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == expected


def test_the_order_depends_on_seed_and_weights(datasets):
    def tokens(**changes):
        data = dataclasses.replace(config(datasets, web=0.5, code=0.3, law=0.2), **changes)
        return open_training_data(data).train_batches(16)[7]['tokens'].tolist()

    expected = tokens()
    assert tokens(num_workers=3, num_threads=1) == expected
    assert tokens(seed=1) != expected
    assert tokens(shuffle_shards=1) == expected  # with a single shard each, there is only one pool
    assert tokens(sources=config(datasets, web=0.5, code=0.2, law=0.3).sources) != expected


def test_weights_change_at_a_step_and_sources_continue(datasets):
    corpus = open_training_data(config(datasets, web=0.5, code=0.5))
    stages = (0, (1, 0)), (3, (1, 3)), (9, (0.5, 0.5))
    batches = corpus.train_batches(8, sources_schedule=stages)
    rows = {0: [], 1: []}
    for step in range(16):
        batch = batches[step]
        for source, row in zip(batch['sources'], batch['tokens'], strict=True):
            rows[source].append(row.tolist())
        if step == 2:
            assert not rows[1]
    # Each source has the order that it has without a schedule.
    constant = corpus.train_batches(8)
    for source, of_source in rows.items():
        expected = [
            row.tolist() for step in range(40) for row in constant[step]['tokens'][constant[step]['sources'] == source]
        ]
        assert of_source == expected[: len(of_source)]
        assert len(of_source) > 30
    # Each host computes its rows and each step on its own.
    parts = [corpus.train_batches(8, slice(first, first + 4), (), stages)[11]['tokens'] for first in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(parts), batches[11]['tokens'])
    split = corpus.train_batches(8, None, ((0, 2), (5, 1)), stages)
    for step, num_splits in ((4, 2), (11, 1)):
        np.testing.assert_array_equal(
            split[step]['tokens'], batches[step]['tokens'].reshape(8 * num_splits, WINDOW // num_splits)
        )
    assert corpus.mixture(8, stages).rows_taken(128) == [len(rows[0]), len(rows[1])]
    # Negative control
    assert constant[11]['tokens'].tolist() != batches[11]['tokens'].tolist()


def test_validation_has_all_windows_of_all_sources_once(datasets):
    corpus = open_training_data(config(datasets, web=0.9, law=0.1))
    batches = corpus.validation_batches(4)
    rows = [tuple(row) for step in range(len(batches)) for row in batches[step]['tokens'].tolist()]
    real = [row for row in rows if any(row)]
    windows = [source.windows('validation', corpus.data) for source in corpus.sources]
    expected = [tuple(w[number]['tokens'].tolist()) for w in windows for number in range(len(w))]
    assert sorted(real) == sorted(expected)
    assert len(corpus.validation_batches(4, 1)) == 1


def test_sources_within_one_data_set(make_dataset):
    shards = [documents(100, 6), documents(200, 4), documents(300, 5)]
    dataset = make_dataset(shards, sources=('web', 'code', 'web'))
    corpus = open_training_data(DataConfig(path=str(dataset.path), seq_len=WINDOW))
    assert corpus.names == ('web', 'code')
    batch = corpus.train_batches(15)[0]
    assert [(1 if o == 2 else 0) for o in source_digits(batch)] == batch['sources'].tolist()
    # A single data set, with and without a weight.
    path = str(dataset.path)
    only = open_training_data(DataConfig(sources=((f'{path}#code', 1.0),), seq_len=WINDOW))
    assert set(source_digits(only.train_batches(8)[0])) == {2}
    weighted = open_training_data(DataConfig(sources=((f'{path}#code', 0.9), (f'{path}#web', 0.1)), seq_len=WINDOW))
    assert weighted.names == ('code', 'web')
    assert Counter(weighted.train_batches(1024)[0]['sources'].tolist())[0] == pytest.approx(922, abs=1)
    assert corpus.fingerprint(8) != weighted.fingerprint(8)
    unnamed = open_training_data(DataConfig(path=path, seq_len=WINDOW), with_sources=False)
    assert unnamed.names == ()
    assert 'sources' not in unnamed.train_batches(4)[0]


def test_a_single_source_has_no_name(datasets):
    corpus = open_training_data(DataConfig(path=str(datasets['web'].path), seq_len=WINDOW))
    assert corpus.names == ()
    assert 'sources' not in corpus.train_batches(4)[0]


def test_directories_with_equal_names_are_named_by_their_paths(make_dataset):
    paths = [str(make_dataset([documents(100, 9)], directory=f'{parent}').path) for parent in ('a', 'b')]
    qualified = [f'{path}#texts' for path in paths]
    assert open_training_data(
        DataConfig(sources=((qualified[0], 1), (qualified[1], 1)), seq_len=WINDOW)
    ).names == tuple(qualified)


def test_the_fingerprint_in_checkpoints(datasets):
    facts = open_training_data(config(datasets, web=0.5, code=0.5)).fingerprint(8)
    assert json.loads(json.dumps(facts)) == facts
    assert facts['weight web'] == 0.5
    assert open_training_data(config(datasets, web=0.5, code=0.4)).fingerprint(8) != facts
    assert open_training_data(config(datasets, web=0.5, law=0.5)).fingerprint(8) != facts
    staged = open_training_data(config(datasets, web=0.5, code=0.5)).fingerprint(8, ((0, (0.9, 0.1)), (3, (0.5, 0.5))))
    assert staged == {**facts, 'weights until step 3': [0.9, 0.1]}
    assert json.loads(json.dumps(staged)) == staged


def test_validation_bytes_are_known_only_if_all_sources_have_them(datasets, make_dataset):
    corpus = open_training_data(config(datasets, web=0.5, code=0.5))
    tokens, text_bytes = corpus.validation_counts
    assert tokens == 2 * 5 * 4
    assert text_bytes == 0  # unknown, because the data set was written from tokens

    def with_bytes(source, text_bytes):
        split = source.dataset.splits['validation']
        counts = {name: dataclasses.replace(facts, text_bytes=text_bytes) for name, facts in split.sources.items()}
        splits = {**source.dataset.splits, 'validation': dataclasses.replace(split, sources=counts)}
        return dataclasses.replace(source, dataset=dataclasses.replace(source.dataset, splits=splits))

    first, second = corpus.sources
    complete = dataclasses.replace(corpus, sources=(with_bytes(first, 70), with_bytes(second, 30)))
    assert complete.validation_counts == (tokens, 100)
    partial = dataclasses.replace(corpus, sources=(with_bytes(first, 70), second))
    assert partial.validation_counts == (tokens, 0)


def test_bad_sources_are_named(datasets, make_dataset):
    web = str(datasets['web'].path)
    with pytest.raises(InputError, match=r"no source 'cod'; available: texts"):
        open_training_data(DataConfig(sources=((f'{web}#cod', 1.0),), seq_len=WINDOW))
    with pytest.raises(InputError, match='contains no data set'):
        open_training_data(DataConfig(sources=((web, 1.0), (f'{web}x', 1.0)), seq_len=WINDOW))
    empty = make_dataset([[]], directory='empty')
    with pytest.raises(InputError, match='empty: the train split is empty'):
        open_training_data(DataConfig(sources=((web, 1.0), (str(empty.path), 1.0)), seq_len=WINDOW)).train_batches(4)
    without = make_dataset([documents(100, 9)], directory='without')
    with pytest.raises(InputError, match='without: the validation split is empty'):
        open_training_data(DataConfig(path=str(without.path), seq_len=WINDOW)).validation_batches(4)
