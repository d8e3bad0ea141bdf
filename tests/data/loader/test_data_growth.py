"""Tests that the memory of the training data depends on the number of shards, but not on sequences or steps."""

import gc

import numpy as np
import pytest

from benchmarks.growth_data import bytes_kept, described_batches
from maxlm.data.loader.mixture import PERIOD, Mixture

SHARDS = 64


@pytest.fixture(scope='module', autouse=True)
def _only_new_objects():
    """Excludes existing objects, such as imported libraries, from garbage collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def index(windows, shards=SHARDS, steps=(0,)):
    """Returns training batches over shards of `windows` sequences, after looking up the rows of some steps."""

    def make():
        batches = described_batches([windows] * shards)
        for step in steps:
            batches.order.locate(step * batches.global_batch)
        return batches

    return bytes_kept(make)


def test_the_index_does_not_grow_with_the_number_of_windows():
    small, large = index(10**3), index(10**9)
    # Larger integers are larger objects.
    assert large < 1.5 * small
    assert small / SHARDS < 1500
    # Negative control: a table of the order of sequences.
    assert bytes_kept(lambda: np.random.default_rng(0).permutation(SHARDS * 10**3)) >= 8 * SHARDS * 10**3 > 5 * small


def test_the_index_grows_linearly_with_shards():
    few, many = index(10**6), index(10**6, shards=8 * SHARDS)
    assert 6 * few < many < 9 * few
    # The memory is less than a thousandth of a table of the sequences.
    assert many < 8 * SHARDS * 10**6 * 8 / 1000


def test_epochs_do_not_accumulate_in_memory():
    steps_per_epoch = 1000 * SHARDS // 32
    # The first index of a process allocates caches.
    index(1000)
    few, many = (index(1000, steps=range(0, epochs * steps_per_epoch, steps_per_epoch)) for epochs in (6, 60))
    assert many < 1.1 * few
    # Negative control: the first epochs allocate memory.
    assert few > 1.1 * index(1000)


# The periods exceed the cache, which holds 64 and 6 of them.
@pytest.mark.parametrize(('num_sources', 'periods'), [(2, 70), (100, 8)])
def test_periods_of_mixtures_do_not_accumulate_in_memory(num_sources, periods):
    period = max(PERIOD, num_sources**2)

    def mixture_after(count):
        mixture = Mixture([1.0] * num_sources, seed=0)
        for number in range(count):
            mixture[number * period]
        return mixture

    few, many = bytes_kept(lambda: mixture_after(periods)), bytes_kept(lambda: mixture_after(2 * periods))
    assert many < 1.1 * few
    assert many < 2e6
    # Negative control: the first periods allocate memory.
    assert bytes_kept(lambda: mixture_after(1)) < few / 5


def test_lookups_of_rows_are_cached():
    lookups = 0

    class CountingMixture(Mixture):
        def _before(self, periods):
            nonlocal lookups
            lookups += 1
            return super()._before(periods)

    mixture = CountingMixture([1.0] * 100, seed=0)
    found = [mixture[row] for row in range(500)]
    # One lookup for the period and one for its end.
    assert lookups == 2
    # Negative control: rows differ, and another period needs new lookups.
    assert len(set(found)) == 500
    mixture[10**9]
    assert lookups == 4
