"""Tests weighted sources: their shares, and the independent computation of rows."""

import itertools
import pickle
import sys
from collections import Counter

import pytest

from maxlm.data.loader.mixture import PERIOD, Mixture, StagedMixture

WEIGHTS = [
    [1.0],
    [1, 1],
    [0.45, 0.25, 0.20, 0.10],
    [3, 1e-5, 2.5],
    [1.0] * 40,
    [1e-9, 1.0],
]


@pytest.mark.parametrize('weights', WEIGHTS)
def test_shares_match_the_weights(weights):
    mixture = Mixture(weights, seed=1)
    total = sum(weights)
    for rows in (PERIOD, 100 * PERIOD, 10**9):
        counts = mixture.rows_taken(rows)
        assert sum(counts) == rows
        # The order within a period is random, so the counts may differ by up to one period.
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - weight / total * rows) <= len(weights) + (rows % PERIOD > 0) * PERIOD
    assert mixture.fractions == pytest.approx([weight / total for weight in weights], abs=1e-11)


@pytest.mark.parametrize('weights', WEIGHTS)
def test_rows_of_a_source_are_consecutive_and_can_be_located(weights):
    mixture = Mixture(weights, seed=5)
    rows = 3 * PERIOD + 17
    counts = Counter()
    for row in range(rows):
        source, number = mixture[row]
        assert number == counts[source]
        counts[source] += 1
        if row % 97 == 0:
            assert mixture.rows_taken(row + 1) == [counts[s] for s in range(len(weights))]
            assert mixture.row_of(source, number) == row
    # Distant rows are computed directly.
    source, number = mixture[10**11 + 3]
    assert mixture.row_of(source, number) == 10**11 + 3


def test_sources_alternate_randomly():
    mixture = Mixture([0.5, 0.5], seed=0)
    sources = [mixture[row][0] for row in range(4000)]
    runs = sum(a != b for a, b in itertools.pairwise(sources))
    assert 1700 < runs < 2300  # random samples give about 2000 runs, blocks a few, and strict alternation 3999
    other, copied = Mixture([0.5, 0.5], seed=1), pickle.loads(pickle.dumps(mixture))
    assert sources != [other[row][0] for row in range(4000)]
    assert sources == [copied[row][0] for row in range(4000)]


def test_a_rare_source_occurs():
    mixture = Mixture([1.0, 1e-4], seed=0)
    assert mixture.rows_taken(10**6)[1] == 99 or mixture.rows_taken(10**6)[1] == 100
    row = mixture.row_of(1, 0)
    assert mixture[row] == (1, 0)


# The second stage has no rows of source 0, and the third none of source 1.
STAGES = (0, [3, 1]), (PERIOD + 500, [0, 1]), (PERIOD + 900, [1, 0])


def test_each_source_continues_when_the_weights_change():
    mixture = StagedMixture([(first, Mixture(weights, seed=5)) for first, weights in STAGES])
    mixture = pickle.loads(pickle.dumps(mixture))
    counts = Counter()
    for row in range(2 * PERIOD):
        source, number = mixture[row]
        assert number == counts[source]
        counts[source] += 1
        if row % 97 == 0 or row in (PERIOD + 499, PERIOD + 500):
            assert mixture.rows_taken(row + 1) == [counts[0], counts[1]]
            assert mixture.row_of(source, number) == row
        if row == PERIOD + 499:
            assert counts[1] / row == pytest.approx(0.25, abs=0.02)
            before = counts.copy()
    assert counts[1] == before[1] + 400
    assert (mixture.num_rows(0), mixture.num_rows(1)) == (sys.maxsize, counts[1])
    # Negative control: a mixture with the weights of the last stage skips rows of source 0.
    assert Mixture(STAGES[-1][1], seed=5)[PERIOD + 900] != mixture[PERIOD + 900] == (0, before[0])


def test_equal_stages_keep_the_shares():
    staged = StagedMixture([(first, Mixture([7, 3], seed=1)) for first in (0, 10, 10, 4000)])
    plain = Mixture([7, 3], seed=1)
    assert [staged[row] for row in range(10)] == [plain[row] for row in range(10)]
    assert staged.rows_taken(10**6) == pytest.approx(plain.rows_taken(10**6), abs=PERIOD)
    assert [staged.num_rows(source) for source in (0, 1)] == [plain.num_rows(0), plain.num_rows(1)]
