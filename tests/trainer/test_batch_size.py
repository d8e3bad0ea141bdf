import pytest

from maxlm.data.loader.batch_rows import BatchRows, trained_before
from maxlm.data.loader.skipped_batches import data_index
from maxlm.trainer.checkpointing import with_batch_size
from maxlm.training.decisions.run_control import RunControl


def rows_of(decisions, size, steps):
    """Returns the rows of steps after a change to batches of `size`."""
    rows = BatchRows.of(size, decisions.batch_sizes)
    firsts = [rows.first_row(data_index(step, decisions.skips)) for step in steps]
    return [row for first in firsts for row in range(first, first + size)]


def test_the_next_batch_begins_with_the_next_sequence():
    decisions = with_batch_size(RunControl(), 5, before=8, now=12)
    assert decisions == RunControl(batch_sizes=((0, 0, 8), (5, 5, 12)))
    assert rows_of(decisions, 12, range(5, 9)) == list(range(40, 88))
    assert trained_before(decisions.batch_sizes) == (5, 40)
    assert with_batch_size(decisions, 7, before=12, now=12) is decisions
    assert trained_before(()) == (0, 0)


@pytest.mark.parametrize('size', [3, 8, 16])
@pytest.mark.parametrize('skips', [((2, 4),), ((2, 4), (9, 11)), ((9, 11), (12, 13)), ((2, 4), (7, 9))])
def test_skipped_batches_stay_skipped(skips, size):
    """Batches of 4 until step 5: sequences that are skipped then are not read after the change either."""
    step, before = 5, RunControl(skips=skips)
    after = with_batch_size(before, step, before=4, now=size)
    first = 4 * data_index(step, skips)
    skipped = {row for start, stop in skips for row in range(4 * start, 4 * stop)}
    read = rows_of(after, size, range(step, step + 60))
    assert len(read) == len({*read})
    assert min(read) >= first
    assert not skipped & {*read}
    # At most the rest of the batches at both ends of each range is skipped in addition.
    left_out = {*range(first, max(read))} - {*read} - skipped
    assert len(left_out) <= 2 * (size - 1) * len(skips)
    # Negative control: the numbers of batches to skip mean other sequences with the new size.
    unconverted = rows_of(before._replace(batch_sizes=after.batch_sizes), size, range(step, step + 60))
    assert bool(skipped & {*unconverted}) == (skips[-1][0] > data_index(step, skips))
