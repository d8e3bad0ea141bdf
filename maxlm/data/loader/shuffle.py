"""The endless order of a split's windows: any place of it is computed, and what is kept does not grow with them."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

# Raised whenever a place leads to another window: a run goes on in another order only if it is told to.
VERSION = 2
# Odd, so that different seeds stay different modulo 2³².
SEED_STRIDE = 0x9E3779B1
# Rounds of the cipher behind the permutation. Four, as in grain's own shuffle, are too few for large data: the first
# 5 000 places of 10¹² fail a chi-square test (1 291 where 63 is expected); with eight they pass, for 0.5 µs more.
ROUNDS = 8
# Up to so many items a permutation is a table. The cipher permutes a power of two of a million or so and is asked again
# until it says a number that is within the range: 9 ms for a place of 10 items, 0.02 ms of 12 000.
TABLE_SIZE = 2**14
# Tables that are kept, of 32 KB at most: those of the pools of all sources that data is read ahead from.
NUM_CACHED_TABLES = 512
# Epochs whose pools are kept: those that the batches being read ahead can be in.
NUM_CACHED_EPOCHS = 4


def feistel_permutation(position: int, size: int, seed: int) -> int:
    """The item at a place of a permutation of `size` items, 0 … size - 1: a pure function, and the same for ever.

    Up to TABLE_SIZE items the permutation sorts random bits of the seed, and is kept for a while. Of more it is
    computed place by place by a small cipher (`grain.experimental.index_shuffle`).
    """
    if size <= TABLE_SIZE:
        return int(_table(size, seed)[position])
    return int(index_shuffle(position, max_index=size - 1, seed=seed, rounds=ROUNDS))


@functools.lru_cache(NUM_CACHED_TABLES)
def _table(size: int, seed: int) -> np.ndarray:
    # NumPy promises the bits of a generator for ever, and the way of its `permutation` not.
    return np.argsort(np.random.Philox(key=seed).random_raw(size), kind='stable').astype(np.uint16)


class ShuffleBlock(NamedTuple):
    """Places [start, stop) of the order, which lead to windows of these shards only."""

    start: int
    stop: int
    shards: tuple[int, ...]


class ShuffledIndex:
    """place → window, a pure function of (windows of each shard, seed, pool_shards). Picklable.

    Every epoch has every window once. An epoch is a sequence of pools of `pool_shards` shards each, shuffled shards
    first; within a pool all windows are shuffled. So the windows of a batch come from few shards, which can be fetched
    ahead and given up afterwards. With pool_shards = 0 all shards are one pool: the windows of an epoch are a
    permutation of all.

    See `permuted`: the cost of a place does not grow with the number of windows.

    Args:
        shard_windows: number of windows in each shard; window numbers count through them. At least one window.
        seed: 0 … 2³² - 1.
        pool_shards: shards in a pool; 0 = all.
    """

    def __init__(self, shard_windows: Sequence[int], *, seed: int, pool_shards: int = 0):
        # First window of each shard, and one past the last of all.
        self._firsts = list(itertools.accumulate(shard_windows, initial=0))
        self._seed = seed
        self._pool_shards = min(pool_shards or len(shard_windows), len(shard_windows))
        assert len(self) > 0
        self._cached_pools = functools.lru_cache(NUM_CACHED_EPOCHS)(self._pools)

    def __getstate__(self) -> tuple[list[int], int, int]:
        return self._firsts, self._seed, self._pool_shards

    def __setstate__(self, state: tuple[list[int], int, int]) -> None:
        self._firsts, self._seed, self._pool_shards = state
        self._cached_pools = functools.lru_cache(NUM_CACHED_EPOCHS)(self._pools)

    def __len__(self) -> int:
        """Windows of an epoch."""
        return self._firsts[-1]

    def __getitem__(self, position: int) -> int:
        """The window at a place of the endless order, 0 … len - 1."""
        epoch, position = divmod(position, len(self))
        pools = self._cached_pools(epoch)
        pool = bisect.bisect_right(pools.starts, position) - 1
        size = pools.starts[pool + 1] - pools.starts[pool]
        index = feistel_permutation(position - pools.starts[pool], size, _seed(self._seed, epoch, 1 + pool))
        member = bisect.bisect_right(pools.offsets[pool], index) - 1
        return self._firsts[pools.shards[pool][member]] + index - pools.offsets[pool][member]

    def blocks(self, position: int) -> Iterator[ShuffleBlock]:
        """The pools of the order, without end, from the one on that `place` is in."""
        for epoch in itertools.count(position // len(self)):
            pools = self._cached_pools(epoch)
            for shards, (start, stop) in zip(pools.shards, itertools.pairwise(pools.starts), strict=True):
                first = epoch * len(self)
                if first + stop > position:
                    yield ShuffleBlock(first + start, first + stop, shards)

    def _pools(self, epoch: int) -> _Pools:
        # Shards without a window (a single token) would make a pool of nothing.
        filled = [shard for shard, (a, b) in enumerate(itertools.pairwise(self._firsts)) if b > a]
        if self._pool_shards < len(self._firsts) - 1:
            seed = _seed(self._seed, epoch, 0)
            filled = [filled[feistel_permutation(position, len(filled), seed)] for position in range(len(filled))]
        shards = _batched(filled, self._pool_shards)
        offsets = [
            list(itertools.accumulate((self._firsts[shard + 1] - self._firsts[shard] for shard in pool), initial=0))
            for pool in shards
        ]
        return _Pools(shards, offsets, list(itertools.accumulate((offset[-1] for offset in offsets), initial=0)))


class _Pools(NamedTuple):
    # Shards of each pool, in the order of the pool's window numbers.
    shards: list[tuple[int, ...]]
    # Of each pool: the number of its first window in each of its shards, and one past its last.
    offsets: list[list[int]]
    # First place of each pool within the epoch, and one past the last of all.
    starts: list[int]


def _batched(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def _seed(seed: int, epoch: int, stream: int) -> int:
    """Different for each use: seeds are spread, else epoch 1 of seed 0 were epoch 0 of seed 1."""
    return (seed * SEED_STRIDE + epoch + stream * 0x85EBCA6B) % 2**32
