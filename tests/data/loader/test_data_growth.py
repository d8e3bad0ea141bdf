"""What the training data keep in memory: a list of shards, whatever the windows in them, and no more over time."""

import gc

import numpy as np
import pytest

from benchmarks.growth_data import bytes_kept, described_batches
from maxlm.data.loader.mixture import PERIOD, Mixture

SHARDS = 64


@pytest.fixture(scope='module', autouse=True)
def _only_new_objects():
    """Takes what exists already, such as imported libraries, out of garbage collections, of which there are many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def index(windows, shards=SHARDS, steps=(0,)):
    """Training batches over so many windows in each of the shards, after the rows of some steps were found."""

    def make():
        batches = described_batches([windows] * shards)
        for step in steps:
            batches.order.locate(step * batches.global_batch)
        return batches

    return bytes_kept(make)


def test_the_index_does_not_grow_with_windows():
    small, large = index(10**3), index(10**9)
    # Larger numbers are larger objects.
    assert large < 1.5 * small
    assert small / SHARDS < 1500
    # Control: a table of the windows' order.
    assert bytes_kept(lambda: np.random.default_rng(0).permutation(SHARDS * 10**3)) >= 8 * SHARDS * 10**3 > 5 * small


def test_the_index_grows_with_shards_at_most():
    few, many = index(10**6), index(10**6, shards=8 * SHARDS)
    assert 6 * few < many < 9 * few
    # Less than a thousandth of what a table of their windows would take.
    assert many < 8 * SHARDS * 10**6 * 8 / 1000


def test_epochs_are_not_kept():
    of_an_epoch = 1000 * SHARDS // 32
    # What only the first of a process keeps.
    index(1000)
    few, many = (index(1000, steps=range(0, epochs * of_an_epoch, of_an_epoch)) for epochs in (6, 60))
    assert many < 1.1 * few
    # Control: the first epochs are.
    assert few > 1.1 * index(1000)


# More periods than are kept: 64 of them, and 6.
@pytest.mark.parametrize(('num_sources', 'periods'), [(2, 70), (100, 8)])
def test_arrangements_of_sources_are_not_kept(num_sources, periods):
    period = max(PERIOD, num_sources**2)

    def after(count):
        mixture = Mixture([1.0] * num_sources, seed=0)
        for number in range(count):
            mixture[number * period]
        return mixture

    few, many = bytes_kept(lambda: after(periods)), bytes_kept(lambda: after(2 * periods))
    assert many < 1.1 * few
    assert many < 2e6
    # Control: the first ones are.
    assert bytes_kept(lambda: after(1)) < few / 5


def test_a_row_of_many_sources_is_looked_up():
    lookups = 0

    class Counted(Mixture):
        def _before(self, periods):
            nonlocal lookups
            lookups += 1
            return super()._before(periods)

    mixture = Counted([1.0] * 100, seed=0)
    found = [mixture[row] for row in range(500)]
    # Once for the period, and where it ends.
    assert lookups == 2
    # Control: rows are not all the same, and another period is counted anew.
    assert len(set(found)) == 500
    mixture[10**9]
    assert lookups == 4
