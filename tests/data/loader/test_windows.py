import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.loader.windows import Sequences, mean_segment_length, window_batch

BLOCK = 8
LENGTHS = [2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000]
END = 0


def reference_windows(shards, length, *, isolate_documents, train_first_token):
    """Computes the sequences by definition, token by token."""
    windows = []
    for documents in shards:
        stream = [token for document in documents for token in [*document, END]]
        for start in range(0, len(stream) - 1, length):
            window = {name: [] for name in ('tokens', 'targets', 'weights', 'segments', 'positions')}
            segment, position = 1, 0
            for i in range(start, start + length):
                if i + 1 >= len(stream):
                    values = (0, 0, 0.0, 0, 0)
                else:
                    weight = 0.0 if stream[i] == END and not train_first_token else 1.0
                    values = (stream[i], stream[i + 1], weight, segment, position)
                for name, value in zip(window, values, strict=True):
                    window[name].append(value)
                position += 1
                if i < len(stream) and stream[i] == END and isolate_documents:
                    segment, position = segment + 1, 0
            windows.append(window)
    return windows


@pytest.mark.parametrize('train_first_token', [True, False])
@pytest.mark.parametrize('isolate_documents', [True, False])
@pytest.mark.parametrize('length', LENGTHS)
def test_windows_match_the_definition(make_dataset, random_shards, length, isolate_documents, train_first_token):
    dataset = make_dataset(random_shards, block=BLOCK)
    options = {'isolate_documents': isolate_documents, 'train_first_token': train_first_token}
    windows = Sequences(dataset, 'train', length, **options)
    expected = reference_windows(random_shards, length, **options)
    assert len(windows) == len(expected)
    for i, reference in enumerate(expected):
        for name, values in reference.items():
            np.testing.assert_array_equal(windows[i][name], values, err_msg=f'{name} of window {i}')
    types = {name: values.dtype for name, values in windows[0].items()}
    assert types == {**dict.fromkeys(('tokens', 'targets', 'segments', 'positions'), np.int32), 'weights': np.float32}


def test_isolation_of_documents_changes_the_windows(make_dataset, random_shards):
    dataset = make_dataset(random_shards, block=BLOCK)
    isolated, joined = (Sequences(dataset, 'train', 100, isolate_documents=isolate)[0] for isolate in (True, False))
    np.testing.assert_array_equal(isolated['tokens'], joined['tokens'])
    np.testing.assert_array_equal(isolated['weights'], joined['weights'])
    assert (isolated['segments'] != joined['segments']).any()
    assert (isolated['positions'] != joined['positions']).any()


@pytest.mark.parametrize('isolate_documents', [True, False])
@pytest.mark.parametrize('parts', [2, 4])
def test_split_windows_equal_shorter_windows(make_dataset, random_shards, parts, isolate_documents):
    dataset = make_dataset(random_shards, block=BLOCK)
    long = Sequences(dataset, 'train', 16, isolate_documents=isolate_documents)
    short = Sequences(dataset, 'train', 16 // parts, isolate_documents=isolate_documents)
    cut = long.batch([long.stream(number) for number in range(len(long))], num_splits=parts)
    assert {rows.shape for rows in cut.values()} == {(len(long) * parts, 16 // parts)}
    rows = [{name: rows[i] for name, rows in cut.items()} for i in range(len(long) * parts)]
    # The last sequence of a shard may contain parts with padding only; other parts are the short sequences in order.
    rows = [row for row in rows if row['segments'].any()]
    assert len(rows) == len(short)
    for number, row in enumerate(rows):
        for name, values in short[number].items():
            np.testing.assert_array_equal(row[name], values, err_msg=f'{name} of window {number}')


def test_a_window_does_not_depend_on_the_other_windows_of_a_batch():
    # The first sequence has padding after its end of document.
    streams = [np.array([5, 6, 7], np.uint16), np.arange(10, 15, dtype=np.uint16)]
    together = window_batch(streams, 4, end_of_document=7, isolate_documents=True)
    assert together['targets'].tolist() == [[6, 7, 0, 0], [11, 12, 13, 14]]
    for number, stream in enumerate(streams):
        alone = window_batch([stream], 4, end_of_document=7, isolate_documents=True)
        for name, rows in alone.items():
            np.testing.assert_array_equal(rows[0], together[name][number], err_msg=f'{name} of window {number}')


@pytest.mark.parametrize('train_first_token', [True, False])
@pytest.mark.parametrize('length', LENGTHS)
def test_every_token_is_a_target_once(make_dataset, random_shards, length, train_first_token):
    # Each token has a unique id, so that targets can be counted by value.
    numbers = itertools.count(1)
    shards = [[[next(numbers) for _ in document] for document in documents] for documents in random_shards]
    windows = Sequences(make_dataset(shards, block=BLOCK), 'train', length, train_first_token=train_first_token)
    weighted = np.concatenate([w['targets'][w['weights'] > 0] for w in map(windows.__getitem__, range(len(windows)))])
    documents = [document for documents in shards for document in documents]
    firsts_of_shards = {documents[0][0] for documents in shards}
    untrained = firsts_of_shards if train_first_token else {document[0] for document in documents}
    expected = [token for document in documents for token in document if token not in untrained]
    assert sorted(weighted[weighted != END].tolist()) == expected
    assert (weighted == END).sum() == len(documents)
    unweighted = np.concatenate(
        [w['targets'][w['weights'] == 0] for w in map(windows.__getitem__, range(len(windows)))]
    )
    assert set(unweighted.tolist()) - {0} == untrained - firsts_of_shards


def test_tokens_that_begin_every_text_are_never_targets():
    begin, prefix = 7, 8
    stream = np.array([begin, prefix, 1, END, begin, prefix, 2, 3, END], np.uint16)
    found = {
        (train_first_token, ids): window_batch(
            [stream],
            8,
            end_of_document=END,
            isolate_documents=True,
            train_first_token=train_first_token,
            beginning_of_document=ids,
        )['weights'][0].tolist()
        for train_first_token in (True, False)
        for ids in ((), (begin,), (begin, prefix))
    }
    assert found[True, ()] == [1] * 8
    assert found[False, ()] == found[True, (begin,)] == found[False, (begin,)] == [1, 1, 1, 0, 1, 1, 1, 1]
    assert found[True, (begin, prefix)] == found[False, (begin, prefix)] == [0, 1, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize('marked', [False, True])
def test_the_tokens_before_every_text_come_from_the_dataset(make_dataset, marked):
    begin = 7
    dataset = make_dataset([[[begin, 1, 2], [begin, 3]]])
    with_ids = dataclasses.replace(dataset, beginning_of_document=(begin,))
    assert Sequences(dataset, 'train', 6, marked=marked)[0]['weights'].tolist() == [1] * 6
    for windows in (
        Sequences(with_ids, 'train', 6, marked=marked),
        Sequences(dataset, 'train', 6, marked=marked, beginning_of_document=(begin,)),
    ):
        assert windows[0]['targets'].tolist() == [1, 2, END, begin, 3, END]
        assert windows[0]['weights'].tolist() == [1, 1, 1, 0, 1, 1]


def test_records_contain_overlapping_blocks(make_dataset, random_shards):
    dataset = make_dataset(random_shards, block=BLOCK)
    for shard, documents in zip(dataset.splits['train'].shards, random_shards, strict=True):
        stream = [token for document in documents for token in [*document, END]]
        reader = ArrayRecordReader(str(dataset.path / shard.name))
        records = [np.frombuffer(record, '<u2').tolist() for record in reader.read_all()]
        expected = [stream[start : start + BLOCK + 1] for start in range(0, len(stream) - 1, BLOCK)]
        assert records == expected
        assert (shard.tokens, shard.documents) == (len(stream), len(documents))


def test_pickled_windows_read_the_same(make_dataset, random_shards):
    windows = Sequences(make_dataset(random_shards), 'train', 7)
    before = windows[3]['tokens']
    copy = pickle.loads(pickle.dumps(windows))
    np.testing.assert_array_equal(copy[3]['tokens'], before)
    assert (copy[4]['tokens'] != before).any()


def test_indices_out_of_range_are_rejected(make_dataset, random_shards):
    windows = Sequences(make_dataset(random_shards), 'train', 7)
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


@pytest.mark.parametrize('extra', [-1, 0, 1, 2])
def test_streams_around_a_block_boundary(make_dataset, extra):
    document = list(range(1, 2 * BLOCK + extra))  # 2 · BLOCK + extra tokens with the end token
    dataset = make_dataset([[document]], block=BLOCK)
    stop = 2 * BLOCK + extra
    assert TokenReader(dataset, dataset.splits['train'].shards).read(0, 0, stop).tolist() == [*document, END]
    assert TokenReader(dataset, dataset.splits['train'].shards).read(0, stop - 2, stop).tolist() == [document[-1], END]


def test_the_mean_length_of_documents():
    """Rows of documents with 3 and 1 tokens; 4 tokens; and 2 tokens before padding: 10 tokens in 4 documents."""
    segments = np.array([[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 0, 0]])
    assert mean_segment_length(segments) == 10 / 4
    assert mean_segment_length(np.zeros((2, 4), int)) == 0
