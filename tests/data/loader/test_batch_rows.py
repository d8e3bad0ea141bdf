import itertools

import pytest

from maxlm.data.loader.batch_rows import BatchRows, sequences_after


def test_a_constant_batch_size_multiplies():
    rows = BatchRows.of(6)
    assert [rows.first_row(batch) for batch in (0, 1, 7)] == [0, 6, 42]
    assert [rows.batch_of(row) for row in (0, 5, 6, 47)] == [0, 0, 1, 7]
    assert sequences_after(7, 6, ()) == 42


@pytest.mark.parametrize('sizes', [[4], [4, 9, 2], [3, 3, 1, 8]])
def test_each_row_is_in_one_batch(sizes):
    """Compares with the definition: the batches of all stages one after another."""
    starts = range(0, 5 * len(sizes), 5)
    rows = BatchRows(tuple(zip(starts, sizes, strict=True)))
    lengths = [size for size in sizes for _ in range(5)] + [sizes[-1]] * 10
    owners = [batch for batch, length in enumerate(lengths) for _ in range(length)]
    assert [rows.batch_of(row) for row in range(len(owners))] == owners
    assert [rows.first_row(batch) for batch in range(len(lengths))] == [0, *itertools.accumulate(lengths)][:-1]
