"""Tests the order of the sequences: each occurs once per epoch, and the shuffle is statistically random."""

import pickle

import numpy as np
import pytest

from maxlm.data.loader.shuffle import TABLE_SIZE, VERSION, ShuffledIndex, feistel_permutation

SHARDS = [5, 0, 17, 1, 40, 8, 3]


def epoch(order, number=0):
    return [order[number * len(order) + place] for place in range(len(order))]


@pytest.mark.parametrize('pool_shards', [0, 1, 2, 3, 100])
@pytest.mark.parametrize('seed', [0, 7])
def test_each_epoch_has_every_window_once_in_a_new_order(pool_shards, seed):
    order = ShuffledIndex(SHARDS, seed=seed, pool_shards=pool_shards)
    epochs = [epoch(order, number) for number in range(5)]
    assert all(sorted(windows) == list(range(sum(SHARDS))) for windows in epochs)
    assert len({tuple(windows) for windows in epochs}) == 5
    assert list(range(sum(SHARDS))) not in epochs
    # Epoch 1 of a seed differs from epoch 0 of the next seed.
    assert epochs[1] != epoch(ShuffledIndex(SHARDS, seed=seed + 1, pool_shards=pool_shards))
    assert epochs[0] == epoch(pickle.loads(pickle.dumps(order)))


@pytest.mark.parametrize('size', [1, 2, 3, TABLE_SIZE - 1, TABLE_SIZE, TABLE_SIZE + 1])
def test_a_permutation_has_every_item_once(size):
    items = [feistel_permutation(place, size, seed=5) for place in range(size)]
    assert sorted(items) == list(range(size))
    if size > 3:
        assert items[:100] != [feistel_permutation(place, size, seed=6) for place in range(min(size, 100))]


def test_the_order_does_not_change_between_releases():
    # Values for a table, for pools and for the cipher. If these numbers change, increase VERSION.
    assert VERSION == 2
    assert epoch(ShuffledIndex([5, 5], seed=7), 3) == [8, 9, 6, 2, 5, 1, 4, 7, 0, 3]
    assert epoch(ShuffledIndex([3, 2, 4, 1], seed=7, pool_shards=2)) == [5, 7, 2, 8, 0, 6, 1, 4, 9, 3]
    in_order = ShuffledIndex([3, 2, 4, 1], seed=7, pool_shards=2, in_order=True)
    assert epoch(in_order) == [3, 2, 0, 4, 1, 9, 7, 8, 5, 6]
    assert epoch(in_order, 1) == epoch(ShuffledIndex([3, 2, 4, 1], seed=7, pool_shards=2), 1)
    large = ShuffledIndex([10**6], seed=7)
    assert [large[place] for place in range(4)] == [656678, 217238, 575118, 649776]


@pytest.mark.parametrize(('pool_shards', 'complete'), [(0, [5, 5, 22, 23, 63]), (2, [0, 0, 22, 22, 63])])
def test_appended_shards_do_not_change_the_complete_pools_in_order(pool_shards, complete):
    # The second shard is empty, so it is in no pool.
    orders = [
        ShuffledIndex(SHARDS[:count], seed=3, pool_shards=pool_shards, in_order=True) for count in (1, 2, 3, 4, 5)
    ]
    assert [order.complete_windows for order in orders] == complete
    everything = ShuffledIndex(SHARDS, seed=3, pool_shards=pool_shards, in_order=True)
    for order, count in zip(orders, complete, strict=True):
        assert [order[place] for place in range(count)] == [everything[place] for place in range(count)]
        assert pickle.loads(pickle.dumps(order)).complete_windows == count
    # The usual order does change.
    assert epoch(ShuffledIndex(SHARDS[:4], seed=3, pool_shards=2)) != epoch(ShuffledIndex(SHARDS, seed=3))[:23]


def test_pools_have_separate_shards_in_a_new_order_each_epoch():
    order = ShuffledIndex(SHARDS, seed=3, pool_shards=2)
    firsts = np.cumsum([0, *SHARDS])
    orders = []
    for number in range(4):
        spans = []
        for span in order.blocks(number * len(order)):
            if span.start == (number + 1) * len(order):
                break
            spans.append(span)
        assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]
        for start, stop, shards in spans:
            found = {int(np.searchsorted(firsts, order[place], 'right')) - 1 for place in range(start, stop)}
            assert found == set(shards)
            assert len(shards) <= 2
        # The empty shard is in no block.
        assert sorted(shard for span in spans for shard in span.shards) == [0, 2, 3, 4, 5, 6]
        orders.append(tuple(span.shards for span in spans))
    assert len(set(orders)) > 1


@pytest.mark.parametrize('pool_shards', [0, 2])
def test_blocks_start_with_the_block_of_a_position(pool_shards):
    order = ShuffledIndex(SHARDS, seed=3, pool_shards=pool_shards)
    for place in range(2 * len(order)):
        span = next(order.blocks(place))
        assert span.start <= place < span.stop


def test_a_permutation_too_large_for_a_table():
    # 10¹² sequences in 100 000 shards; a table would take 8 TB.
    order = ShuffledIndex([10**7] * 10**5, seed=1)
    places = [order[place] for place in range(20_000)]
    assert len(set(places)) == len(places)
    assert min(places) >= 0
    assert max(places) < 10**12
    assert abs(np.mean(places) / 10**12 - 0.5) < 0.01


def chi_square(windows, bins):
    """Returns Pearson's statistic of (position, sequence) over bins × bins equal cells, and its degrees of freedom."""
    count = len(windows)
    places = np.arange(count) * bins // count
    table = np.zeros((bins, bins))
    np.add.at(table, (places, np.asarray(windows) * bins // count), 1)
    expected = count / bins**2
    return ((table - expected) ** 2 / expected).sum(), (bins - 1) ** 2


@pytest.mark.parametrize(
    ('count', 'seed'), [*((1_000, seed) for seed in range(5)), (20_000, 0), (20_000, 1), (65_537, 0)]
)
def test_the_shuffle_is_as_random_as_a_permutation(count, seed):
    windows = np.array(epoch(ShuffledIndex([count // 2, count - count // 2], seed=seed)))
    # For a random permutation, |window - place| has the mean (n² - 1) / 3n and a standard deviation near n / √n · 0.3.
    distance = np.abs(windows - np.arange(count)).mean()
    assert abs(distance - (count**2 - 1) / (3 * count)) < 4 * 0.3 * np.sqrt(count)
    # Adjacent positions have the same mean distance, so the order of the corpus is not preserved.
    neighbor_distance = np.abs(np.diff(windows)).mean()
    assert abs(neighbor_distance - count / 3) < 4 * 0.4 * np.sqrt(count)
    statistic, freedom = chi_square(windows, bins=16)
    # The bound is five standard deviations of a chi-square distribution.
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_statistics_detect_a_poor_shuffle():
    count = 20_000
    rng = np.random.default_rng(0)
    # A shuffle buffer with a tenth of the data, as in streaming loaders.
    buffered = np.concatenate([start + rng.permutation(count // 10) for start in range(0, count, count // 10)])
    statistic, freedom = chi_square(buffered, bins=16)
    assert abs(statistic - freedom) > 5 * np.sqrt(2 * freedom)
    assert abs(np.abs(buffered - np.arange(count)).mean() - (count**2 - 1) / (3 * count)) > 4 * 0.3 * np.sqrt(count)
    rotated = (np.arange(count) + count // 3) % count
    assert abs(np.abs(np.diff(rotated)).mean() - count / 3) > 4 * 0.4 * np.sqrt(count)
    # A random permutation passes.
    permutation = rng.permutation(count)
    statistic, freedom = chi_square(permutation, bins=16)
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
