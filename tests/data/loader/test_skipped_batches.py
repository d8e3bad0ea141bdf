"""Tests the batch of each step after skips, which does not depend on the order of the skips."""

import itertools
import pickle

import numpy as np
import pytest

from maxlm.data.loader.skipped_batches import SkippingBatches, data_index, skip_steps


def remaining(skips, number=100):
    """Returns the batches that are not skipped, by enumeration."""
    return [batch for batch in range(number) if not any(start <= batch < stop for start, stop in skips)]


@pytest.mark.parametrize('skips', [(), ((0, 3),), ((5, 6),), ((5, 9), (10, 12)), ((0, 1), (2, 3), (4, 40))])
def test_steps_use_the_remaining_batches(skips):
    expected = remaining(skips)
    assert [data_index(step, skips) for step in range(len(expected))] == expected
    # Negative control: skipping any batch changes the order.
    assert (expected == list(range(100))) == (skips == ())


@pytest.mark.parametrize(
    ('skips', 'first', 'stop', 'expected'),
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
def test_skipping_additional_steps(skips, first, stop, expected):
    assert skip_steps(skips, first, stop) == expected


def test_each_skip_removes_batches_from_the_remaining_list():
    rng = np.random.default_rng(0)
    for _ in range(100):
        skips, expected = (), list(range(100))
        for _ in range(4):
            first = int(rng.integers(0, 20))
            stop = first + int(rng.integers(1, 8))
            skips = skip_steps(skips, first, stop)
            del expected[first:stop]
            assert remaining(skips) == expected
            assert all(a[1] < b[0] for a, b in itertools.pairwise(skips)), 'ranges must be sorted and not adjacent'


def test_the_remaining_batches():
    batches = SkippingBatches([10, 11, 12, 13, 14, 15], ((1, 3), (5, 6)))
    assert [batches[step] for step in range(len(batches))] == [10, 13, 14]
    restored = pickle.loads(pickle.dumps(batches))
    assert restored[1] == 13
    assert len(SkippingBatches([1, 2, 3], ())) == 3
