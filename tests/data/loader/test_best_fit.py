"""Tests best-fit packing of documents against its definition."""

import numpy as np
import pytest

from maxlm.data.loader.best_fit import pack_documents


def rows_of(packed):
    """Returns the (document, first token, number of tokens) triples of each row."""
    pieces = list(zip(packed.documents.tolist(), packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    return [pieces[start:stop] for start, stop in zip(packed.firsts[:-1], packed.firsts[1:], strict=True)]


def packed_by_definition(lengths, capacity, keeps_rests, buffer_documents):
    """Packs with a search through a list instead of sorted keys."""
    waiting, buffer, rest, rows = list(enumerate(lengths)), list[tuple[int, int]](), None, []
    while waiting or buffer or rest:
        row, free = list[tuple[int, int, int]](), capacity
        while free:
            while waiting and len(buffer) < buffer_documents:
                buffer.append(waiting.pop(0))
            if not buffer and not rest:
                break
            fitting = [document for document in buffer if document[1] <= free]
            if rest:
                (number, length), start = rest
            else:
                if not row or (not fitting and keeps_rests):
                    chosen = min(buffer)
                elif fitting:
                    chosen = max(fitting, key=lambda document: (document[1], -document[0]))
                else:
                    shortest = min(length for _, length in buffer)
                    chosen = max(document for document in buffer if document[1] == shortest)
                buffer.remove(chosen)
                (number, length), start = chosen, 0
            row.append((number, start, min(length - start, free)))
            free -= row[-1][2]
            stop = start + row[-1][2]
            rest = ((number, length), stop) if keeps_rests and stop < length else None
        rows.append(row)
    return rows


def test_rows_of_a_worked_example():
    # Row 0 begins with document 0 and is filled exactly. Row 1 begins with a document that is longer than the row. In
    # row 2, no document fits into the last 2 tokens, and document 5 is the shortest.
    lengths = np.array([6, 15, 3, 8, 4, 5, 9])
    rows = rows_of(pack_documents(lengths, 10, keeps_rests=False))
    assert rows == [[(0, 0, 6), (4, 0, 4)], [(1, 0, 10)], [(2, 0, 3), (5, 0, 5), (3, 0, 2)], [(6, 0, 9)]]
    # The rest of document 1 and document 5 fill row 2. In row 3, document 2 leaves 7 tokens, in which document 3, the
    # oldest, is cut.
    rows = rows_of(pack_documents(lengths, 10, keeps_rests=True))
    assert rows == [
        [(0, 0, 6), (4, 0, 4)],
        [(1, 0, 10)],
        [(1, 10, 5), (5, 0, 5)],
        [(2, 0, 3), (3, 0, 7)],
        [(3, 7, 1), (6, 0, 9)],
    ]


@pytest.mark.parametrize('keeps_rests', [True, False])
@pytest.mark.parametrize('buffer_documents', [1, 5, 1000])
@pytest.mark.parametrize('capacity', [1, 16, 64])
def test_rows_match_the_definition(capacity, buffer_documents, keeps_rests):
    lengths = np.random.default_rng(3).geometric(0.05, 300)
    packed = pack_documents(lengths, capacity, keeps_rests=keeps_rests, buffer_documents=buffer_documents)
    assert rows_of(packed) == packed_by_definition(lengths.tolist(), capacity, keeps_rests, buffer_documents)


def test_every_document_is_used_once_and_only_the_last_row_is_short():
    lengths = np.random.default_rng(5).geometric(0.02, 2000)
    packed = pack_documents(lengths, 64, keeps_rests=False, buffer_documents=100)
    assert sorted(packed.documents.tolist()) == list(range(2000))
    assert not packed.starts.any()
    assert (packed.lengths <= lengths[packed.documents]).all()
    sums = np.add.reduceat(packed.lengths, packed.firsts[:-1])
    assert (sums[:-1] == 64).all()
    assert 0 < sums[-1] <= 64


def test_rests_begin_the_next_row_and_no_token_is_lost():
    lengths = np.random.default_rng(5).geometric(0.02, 2000)
    packed = pack_documents(lengths, 64, keeps_rests=True, buffer_documents=100)
    np.testing.assert_array_equal(np.bincount(packed.documents, packed.lengths), lengths)
    assert (np.add.reduceat(packed.lengths, packed.firsts[:-1])[:-1] == 64).all()
    rests = np.flatnonzero(packed.starts)
    assert len(rests)
    assert np.isin(rests, packed.firsts[:-1]).all()
    np.testing.assert_array_equal(packed.documents[rests], packed.documents[rests - 1])
    np.testing.assert_array_equal(packed.starts[rests], packed.starts[rests - 1] + packed.lengths[rests - 1])
    # Most documents of up to a row are complete.
    short = lengths <= 64
    assert np.count_nonzero(short[packed.documents[rests]]) < 0.3 * np.count_nonzero(short)


def test_long_documents_do_not_wait_until_the_buffer_contains_nothing_else():
    # Every tenth document is longer than a row, and would never be the best fit or the shortest.
    lengths = np.random.default_rng(7).integers(2, 30, 3000)
    lengths[::10] = 1000
    packed = pack_documents(lengths, 64, keeps_rests=False, buffer_documents=100)
    row_of = np.empty(3000, np.int64)
    row_of[packed.documents] = np.repeat(np.arange(len(packed.firsts) - 1), np.diff(packed.firsts))
    # A row begins with the oldest document, so document n is used by row n at the latest.
    assert (row_of <= np.arange(3000)).all()
    assert row_of[lengths == 1000].max() < len(packed.firsts) - 1
    # It begins a row, unless nothing else is left for the end of one.
    assert np.mean(packed.lengths[lengths[packed.documents] == 1000] == 64) > 0.99


def test_a_larger_buffer_loses_fewer_tokens():
    lengths = np.random.default_rng(11).lognormal(5.9, 0.9, 3000).astype(np.int64) + 1
    lost = [
        int((lengths[packed.documents] - packed.lengths).sum())
        for packed in (pack_documents(lengths, 2048, keeps_rests=False, buffer_documents=size) for size in (1, 16, 256))
    ]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 2 * lost[2]


def test_no_documents_give_no_rows():
    assert rows_of(pack_documents(np.zeros(0, np.int64), 8, keeps_rests=True)) == []
