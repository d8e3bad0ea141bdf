"""Skipped batches: the batch of each step, independent of the order in which ranges were skipped."""

import itertools
import pickle

import numpy as np
import pytest

from maxlm.data.loader.skipped_batches import SkippingBatches, data_index, skip_steps


def remaining(skips, number=100):
    """Returns the batches that are not skipped, by enumeration."""
    return [batch for batch in range(number) if not any(start <= batch < stop for start, stop in skips)]


@pytest.mark.parametrize('skips', [(), ((0, 3),), ((5, 6),), ((5, 9), (10, 12)), ((0, 1), (2, 3), (4, 40))])
def test_steps_have_the_batches_that_remain(skips):
    wanted = remaining(skips)
    assert [data_index(step, skips) for step in range(len(wanted))] == wanted
    # Negative control: skipping any batch changes the order.
    assert (wanted == list(range(100))) == (skips == ())


@pytest.mark.parametrize(
    ('skips', 'first', 'stop', 'wanted'),
    [
        ((), 5, 8, ((5, 8),)),
        (((5, 8),), 0, 2, ((0, 2), (5, 8))),
        # Step 5 has batch 8, so the two ranges are adjacent.
        (((5, 8),), 5, 6, ((5, 9),)),
        (((5, 8),), 4, 6, ((4, 9),)),
        (((5, 8),), 3, 5, ((3, 8),)),
        (((5, 8),), 10, 12, ((5, 8), (13, 15))),
        (((5, 8), (10, 12)), 0, 20, ((0, 25),)),
    ],
)
def test_more_steps_are_left_out(skips, first, stop, wanted):
    assert skip_steps(skips, first, stop) == wanted


def test_steps_go_as_if_taken_out_of_the_list_of_those_that_remained():
    rng = np.random.default_rng(0)
    for _ in range(100):
        skips, left = (), list(range(100))
        for _ in range(4):
            first = int(rng.integers(0, 20))
            stop = first + int(rng.integers(1, 8))
            skips = skip_steps(skips, first, stop)
            del left[first:stop]
            assert remaining(skips) == left
            assert all(a[1] < b[0] for a, b in itertools.pairwise(skips)), 'sorted, with gaps'


def test_batches_that_remain():
    batches = SkippingBatches([10, 11, 12, 13, 14, 15], ((1, 3), (5, 6)))
    assert [batches[step] for step in range(len(batches))] == [10, 13, 14]
    again = pickle.loads(pickle.dumps(batches))
    assert again[1] == 13
    assert len(SkippingBatches([1, 2, 3], ())) == 3
