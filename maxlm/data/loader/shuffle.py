"""Endless shuffled order of a split's windows, with random access and constant memory."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

# Increment this version if positions map to different windows. A run does not resume with a different order unless
# the user allows it.
VERSION = 2
# Odd, so that different seeds stay different modulo 2³².
SEED_STRIDE = 0x9E3779B1
# Rounds of the cipher of the permutation. Four rounds, as in grain's shuffle, are too few for large data: the first
# 5 000 positions of 10¹² fail a chi-square test (1 291, expected 63). Eight rounds pass and take 0.5 µs more.
ROUNDS = 8
# Largest permutation stored as a table. The cipher permutes a power of two of about a million and is repeated until the
# result is in the range. This takes 9 ms per position for 10 items and 0.02 ms for 12 000 items.
TABLE_SIZE = 2**14
# Number of cached tables, of at most 32 KB each; they cover the pools of all sources that are being prefetched.
NUM_CACHED_TABLES = 512
# Number of epochs with cached pools; they cover the batches that are being prefetched.
NUM_CACHED_EPOCHS = 4


def feistel_permutation(position: int, size: int, seed: int) -> int:
    """Returns the item at a position of a permutation of the `size` items 0 … size - 1.

    The result is a pure function of the arguments and does not change between versions. Up to TABLE_SIZE items, the
    permutation sorts random bits of the seed and is cached. Larger permutations are computed per position with a small
    cipher (`grain.experimental.index_shuffle`).
    """
    if size <= TABLE_SIZE:
        return int(_table(size, seed)[position])
    # A call with keyword arguments takes a fifth longer.
    return int(index_shuffle(position, size - 1, seed, ROUNDS))


@functools.lru_cache(NUM_CACHED_TABLES)
def _table(size: int, seed: int) -> np.ndarray:
    # NumPy guarantees that the bits of a generator never change, unlike the algorithm of its `permutation`.
    return np.argsort(np.random.Philox(key=seed).random_raw(size), kind='stable').astype(np.uint16)


class ShuffleBlock(NamedTuple):
    """Positions [start, stop) of the order, which contain only windows of these shards."""

    start: int
    stop: int
    shards: tuple[int, ...]


class ShuffledIndex:
    """Maps a position to a window: a pure function of (windows of each shard, seed, pool_shards). Picklable.

    Every epoch contains every window once. An epoch is a sequence of pools. The shards are shuffled and grouped into
    pools of `pool_shards` shards; within a pool, all windows are shuffled. The windows of a batch therefore come from
    few shards, which can be prefetched and evicted afterwards. With pool_shards = 0, all shards form one pool and an
    epoch is a permutation of all windows.

    The cost per position does not grow with the number of windows; see `feistel_permutation`.

    Args:
        shard_windows: number of windows in each shard, at least one in total. Window numbers count through the shards.
        seed: integer from 0 to 2³² - 1.
        pool_shards: number of shards in a pool; 0 = all.
        in_order: the first epoch does not shuffle the shards, and pool_shards = 0 means 1 there. Shards that are
            appended then change no position before `complete_windows`.
    """

    def __init__(self, shard_windows: Sequence[int], *, seed: int, pool_shards: int = 0, in_order: bool = False):
        # First window of each shard, followed by the total number of windows.
        self._firsts = list(itertools.accumulate(shard_windows, initial=0))
        self._seed = seed
        self._pool_shards = min(pool_shards or len(shard_windows), len(shard_windows))
        # Number of shards in a pool of the first epoch if the shards are in order; 0 = as in all other epochs.
        self._first_pool_shards = (pool_shards or 1) if in_order else 0
        assert len(self) > 0
        self._cached_pools = functools.lru_cache(NUM_CACHED_EPOCHS)(self._pools)

    def __getstate__(self) -> tuple[list[int], int, int, int]:
        return self._firsts, self._seed, self._pool_shards, self._first_pool_shards

    def __setstate__(self, state: tuple[list[int], int, int, int]) -> None:
        self._firsts, self._seed, self._pool_shards, self._first_pool_shards = state
        self._cached_pools = functools.lru_cache(NUM_CACHED_EPOCHS)(self._pools)

    def __len__(self) -> int:
        """Returns the number of windows in an epoch."""
        return self._firsts[-1]

    def __getitem__(self, position: int) -> int:
        """Returns the window at a position of the endless order, from 0 to len - 1."""
        epoch, position = divmod(position, len(self))
        pools = self._cached_pools(epoch)
        pool = bisect.bisect_right(pools.starts, position) - 1
        size = pools.starts[pool + 1] - pools.starts[pool]
        index = feistel_permutation(position - pools.starts[pool], size, _seed(self._seed, epoch, 1 + pool))
        member = bisect.bisect_right(pools.offsets[pool], index) - 1
        return self._firsts[pools.shards[pool][member]] + index - pools.offsets[pool][member]

    @property
    def complete_windows(self) -> int:
        """Number of windows in the complete pools of the first epoch."""
        pools = self._cached_pools(0)
        num_complete = sum(len(shards) == (self._first_pool_shards or self._pool_shards) for shards in pools.shards)
        return pools.starts[num_complete]

    def blocks(self, position: int) -> Iterator[ShuffleBlock]:
        """Yields the pools of the order endlessly, starting with the pool that contains `position`."""
        for epoch in itertools.count(position // len(self)):
            pools = self._cached_pools(epoch)
            for shards, (start, stop) in zip(pools.shards, itertools.pairwise(pools.starts), strict=True):
                first = epoch * len(self)
                if first + stop > position:
                    yield ShuffleBlock(first + start, first + stop, shards)

    def _pools(self, epoch: int) -> _Pools:
        # Shards without windows (a single token) could form an empty pool.
        filled = [shard for shard, (a, b) in enumerate(itertools.pairwise(self._firsts)) if b > a]
        in_order = epoch == 0 and self._first_pool_shards > 0
        if self._pool_shards < len(self._firsts) - 1 and not in_order:
            seed = _seed(self._seed, epoch, 0)
            filled = [filled[feistel_permutation(position, len(filled), seed)] for position in range(len(filled))]
        shards = _batched(filled, self._first_pool_shards if in_order else self._pool_shards)
        offsets = [
            list(itertools.accumulate((self._firsts[shard + 1] - self._firsts[shard] for shard in pool), initial=0))
            for pool in shards
        ]
        return _Pools(shards, offsets, list(itertools.accumulate((offset[-1] for offset in offsets), initial=0)))


class _Pools(NamedTuple):
    """Pools of an epoch.

    Attributes:
        shards: the shards of each pool, in the order of the pool's window numbers.
        offsets: for each pool, the first window number of each of its shards, followed by its number of windows.
        starts: first position of each pool within the epoch, followed by the number of positions.
    """

    shards: list[tuple[int, ...]]
    offsets: list[list[int]]
    starts: list[int]


def _batched(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def _seed(seed: int, epoch: int, stream: int) -> int:
    """Returns a distinct seed per use. Without the stride, epoch 1 of seed 0 would equal epoch 0 of seed 1."""
    return (seed * SEED_STRIDE + epoch + stream * 0x85EBCA6B) % 2**32
