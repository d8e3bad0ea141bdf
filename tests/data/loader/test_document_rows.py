"""Tests rows that begin at documents: their contents, counts, order and errors."""

import dataclasses
import itertools
import pickle
import shutil

import numpy as np
import pytest

from maxlm.config.schema import DataConfig
from maxlm.data.loader.best_fit import pack_documents
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.data.loader.document_rows import COUNTS, FIRSTS, PIECES, DocumentSequences
from maxlm.data.loader.source import Source
from maxlm.errors import InputError
from tests.data.conftest import END

BLOCK = 8
BEGINNING = 999


@pytest.fixture
def rows_config(make_dataset, random_shards, tmp_path):
    """Returns the data section of a run with rows of 16 tokens that begin at documents."""
    dataset = make_dataset(random_shards, random_shards[:1], block=BLOCK)
    return DataConfig(path=str(dataset.path), seq_len=16, rows='documents', cache_dir=str(tmp_path / 'cache'))


def open_rows(dataset, window, cache, *, keeps_rests=False, **options):
    shards = dataset.splits['train'].shards
    return DocumentSequences(dataset, 'train', window, shards=shards, keeps_rests=keeps_rests, cache=cache, **options)


def expected_streams(shards, capacity, *, has_lead, keeps_rests=False):
    """Computes the rows from the documents."""
    streams = []
    for documents in shards:
        ended = [[*document, END] for document in documents]
        packed = pack_documents(np.array([len(document) for document in ended]), capacity, keeps_rests=keeps_rests)
        for row in itertools.pairwise(packed.firsts):
            pieces = [(packed.documents[i], packed.starts[i], packed.lengths[i]) for i in range(*row)]
            document, start, _ = pieces[0]
            lead = [ended[document][start - 1] if start else END] if has_lead else []
            streams.append([*lead, *(token for d, start, n in pieces for token in ended[d][start : start + n])])
    return streams


@pytest.mark.parametrize('keeps_rests', [True, False])
@pytest.mark.parametrize('window', [2, 7, BLOCK, 3 * BLOCK, 1000])
def test_rows_contain_the_packed_documents(make_dataset, random_shards, tmp_path, window, keeps_rests):
    # A document without tokens, at the beginning, within and at the end of a shard.
    shards = [[[], *random_shards[0], [], [4], []], *random_shards[1:]]
    rows = open_rows(make_dataset(shards, block=BLOCK), window, tmp_path, keeps_rests=keeps_rests)
    expected = expected_streams(shards, window, has_lead=True, keeps_rests=keeps_rests)
    assert [rows.stream(number).tolist() for number in range(len(rows))] == expected
    assert [rows.shard_of(number) for number in range(len(rows))] == sorted(
        shard for shard, count in enumerate(rows.shard_windows) for _ in range(count)
    )
    with pytest.raises(IndexError):
        rows.stream(len(rows))


def test_rows_begin_with_the_token_that_the_tokenizer_writes(make_dataset, random_shards, tmp_path):
    shards = [[[BEGINNING, *document] for document in documents] for documents in random_shards]
    dataset = dataclasses.replace(make_dataset(shards, block=BLOCK), beginning_of_document=(BEGINNING,))
    rows = open_rows(dataset, 16, tmp_path)
    # Such a row needs no end of document, so a target more fits.
    assert [rows.stream(number).tolist() for number in range(len(rows))] == expected_streams(shards, 17, has_lead=False)
    assert {rows.stream(number)[0] for number in range(len(rows))} == {BEGINNING}


@pytest.mark.parametrize('train_first_token', [True, False])
def test_batches_with_and_without_document_mask(make_dataset, tmp_path, train_first_token):
    dataset = make_dataset([[[5, 6, 7], [8, 9], [10, 11, 12, 13]]], block=BLOCK)
    options = {'train_first_token': train_first_token}
    masked, joined = (
        open_rows(dataset, 9, tmp_path, isolate_documents=isolate, **options) for isolate in (True, False)
    )
    assert masked.stream(0).tolist() == [END, 5, 6, 7, END, 10, 11, 12, 13, END]
    first = float(train_first_token)
    for rows in (masked, joined):
        assert rows[0]['targets'].tolist() == [5, 6, 7, END, 10, 11, 12, 13, END]
        assert rows[0]['weights'].tolist() == [first, 1, 1, 1, first, 1, 1, 1, 1]
    assert masked[0]['segments'].tolist() == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert masked[0]['positions'].tolist() == [0, 0, 1, 2, 3, 0, 1, 2, 3]
    assert joined[0]['segments'].tolist() == [1] * 9
    assert joined[0]['positions'].tolist() == list(range(9))


def test_counts_are_those_of_the_rows(make_dataset, random_shards, tmp_path):
    dataset = make_dataset(random_shards, block=BLOCK)
    rows = open_rows(dataset, 16, tmp_path)
    counts, split = rows.index.counts, dataset.splits['train']
    kept = sum(len(rows.stream(number)) - 1 for number in range(len(rows)))
    assert (counts.tokens, counts.documents) == (split.tokens, split.documents)
    assert counts.lost_tokens == split.tokens - kept > 0
    assert 0 < counts.cut_documents < counts.documents


def test_rests_are_trained_in_the_next_row(make_dataset, random_shards, tmp_path):
    dataset = make_dataset(random_shards, block=BLOCK)
    rows = open_rows(dataset, 16, tmp_path, keeps_rests=True)
    assert (rows.index.counts.lost_tokens, rows.index.counts.documents) == (0, dataset.splits['train'].documents)
    targets = [
        int(t) for i in range(len(rows)) for t, w in zip(rows[i]['targets'], rows[i]['weights'], strict=True) if w
    ]
    tokens = [token for documents in random_shards for document in documents for token in [*document, END]]
    # Each token is a target exactly once.
    assert sorted(targets) == sorted(tokens)


def test_rests_are_trained_after_a_token_before_texts(make_dataset, random_shards, tmp_path):
    shards = [[[BEGINNING, *document] for document in documents] for documents in random_shards]
    dataset = dataclasses.replace(make_dataset(shards, block=BLOCK), beginning_of_document=(BEGINNING,))
    rows = open_rows(dataset, 16, tmp_path, keeps_rests=True)
    targets = [
        int(t) for i in range(len(rows)) for t, w in zip(rows[i]['targets'], rows[i]['weights'], strict=True) if w
    ]
    # The beginning of a document is no target. Each other token is one exactly once, the first of a rest included.
    tokens = [token for documents in random_shards for document in documents for token in [*document, END]]
    assert sorted(targets) == sorted(token for token in tokens if token != BEGINNING)


def test_an_index_is_read_again_and_belongs_to_its_settings(make_dataset, random_shards, tmp_path, monkeypatch):
    dataset = make_dataset(random_shards, block=BLOCK)
    rows = open_rows(dataset, 16, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr('maxlm.data.loader.document_rows.pack_documents', None)
        again = open_rows(dataset, 16, tmp_path)
        for settings in ({'window': 15}, {'keeps_rests': True}):
            with pytest.raises(TypeError):
                open_rows(dataset, **{'window': 16, 'cache': tmp_path, **settings})
    assert len(list((tmp_path / 'rows').iterdir())) == 1
    copied = pickle.loads(pickle.dumps(again))
    assert len(pickle.dumps(again)) < 5000
    for number in range(len(rows)):
        np.testing.assert_array_equal(copied.stream(number), rows.stream(number))


def test_a_damaged_index_and_an_unwritable_cache_are_errors(make_dataset, random_shards, tmp_path):
    dataset = make_dataset(random_shards, block=BLOCK)
    open_rows(dataset, 16, tmp_path)
    for name in (FIRSTS, PIECES, COUNTS):
        (path,) = tmp_path.glob(f'rows/*/{name}')
        content = path.read_bytes()
        for damaged in (content[: len(content) // 24 * 12], b'', b'{'):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r'is damaged .*; delete it'):
                open_rows(dataset, 16, tmp_path)
        path.write_bytes(content)
    open_rows(dataset, 16, tmp_path)
    file = tmp_path / 'file'
    file.touch()
    with pytest.raises(InputError, match=r'set data\.cache_dir'):
        open_rows(dataset, 16, file)


def test_any_number_of_hosts_reads_the_same_rows(rows_config):
    corpus = open_training_data(rows_config)
    whole = corpus.train_batches(4)
    halves = [open_training_data(rows_config).train_batches(4, slice(start, start + 2)) for start in (0, 2)]
    # More than two epochs, in which the order differs.
    num_rows = len(corpus.sources[0].windows('train', rows_config))
    for step in (0, 3, num_rows, 2 * num_rows):
        for name, values in whole[step].items():
            np.testing.assert_array_equal(values, np.concatenate([half[step][name] for half in halves]))
    epochs = [
        [tuple(row) for step in range(epoch * num_rows, (epoch + 1) * num_rows) for row in whole[step]['tokens']]
        for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_validation_reads_the_stream(rows_config):
    stream = open_training_data(dataclasses.replace(rows_config, rows='stream')).validation_batches(4)
    rows = open_training_data(rows_config).validation_batches(4)
    for name, values in stream[0].items():
        np.testing.assert_array_equal(rows[0][name], values)


def test_runs_do_not_resume_with_other_rows(rows_config):
    stream = open_training_data(dataclasses.replace(rows_config, rows='stream')).fingerprint(4)
    documents = open_training_data(rows_config).fingerprint(4)
    assert set(documents.items() ^ stream.items()) == {('rows', 'documents'), ('packing', 1)}


def test_summary(rows_config, tmp_path):
    corpus = open_training_data(rows_config)
    counts = open_rows(corpus.first, 16, tmp_path).index.counts
    line = corpus.sources[0].row_summary(rows_config)
    assert f'{corpus.training_windows:,} rows with data.rows=documents' in line
    assert f'{counts.tokens - counts.lost_tokens:,} of {counts.tokens:,} tokens' in line
    assert corpus.sources[0].row_summary(dataclasses.replace(rows_config, rows='stream')) == ''


@pytest.mark.parametrize(
    ('changes', 'manifest', 'message'),
    [
        ({'url': 'gs://bucket/data'}, {}, 'is in a bucket'),
        ({'is_growing': True}, {}, 'is still being prepared'),
        ({}, {'masked': True}, 'contains conversations'),
    ],
)
def test_data_whose_documents_are_not_known_is_refused(
    make_dataset, random_shards, tmp_path, changes, manifest, message
):
    dataset = dataclasses.replace(make_dataset(random_shards), **manifest)
    source = dataclasses.replace(Source('', dataset, '', 1.0, ''), **changes)
    data = DataConfig(seq_len=16, rows='documents', cache_dir=str(tmp_path))
    with pytest.raises(InputError, match=rf'data\.rows=documents: .*{message}.*data\.rows=stream'):
        _ = TrainingData(data, (source,), ()).training_windows


def test_text_without_document_boundaries_is_refused(make_dataset, tmp_path):
    dataset = make_dataset([[[5] * 400]])
    data = DataConfig(path=str(dataset.path), seq_len=16, rows='documents', cache_dir=str(tmp_path))
    with pytest.raises(InputError, match=r'1 documents in 401 tokens.*set data\.rows=best_fit or stream'):
        _ = open_training_data(data).training_windows
    # Other rows, of 16 targets each, lose nothing. The first token of the stream is no target.
    assert open_training_data(dataclasses.replace(data, rows='stream')).training_windows == 400 // 16
    assert open_training_data(dataclasses.replace(data, rows='best_fit')).training_windows == 401 // 16 + 1


def test_a_deleted_index_is_written_again(rows_config, tmp_path):
    before = open_training_data(rows_config).train_batches(4)[7]
    shutil.rmtree(tmp_path / 'cache')
    after = open_training_data(rows_config).train_batches(4)[7]
    np.testing.assert_array_equal(before['tokens'], after['tokens'])
