"""Weighted data mixture: maps a row of the endless training data to its source as a pure function."""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
from collections.abc import Sequence

import numpy as np

# Number of rows per period. Shares are exact to within a row per period. Many sources need longer periods.
PERIOD = 1024
# Weights are integer fractions of this, so that the result is identical on all machines.
UNIT = 2**40
# Number of rows with cached arrangements, in complete periods; they cover the batches that are being prefetched.
NUM_CACHED_ROWS = 64 * PERIOD

# First step, from 0, and weights of each stage of a mixture.
SourcesSchedule = tuple[tuple[int, tuple[float, ...]], ...]


class Mixture:
    """Maps a row to (source, row of that source). Picklable.

    Rows are grouped in periods. The first k periods contain floor(w_s · k · period) rows of source s; the source with
    the largest weight gets the remaining rows. Shares are exact in the long run and off by less than one row per source
    at the end of any period. Within a period the order of the sources is random, seeded with (seed, period).

    Args:
        weights: weights, not all of which are 0; they need not sum to 1. A source of weight 0 has no rows.
        seed: integer from 0 to 2³² - 1.
    """

    def __init__(self, weights: Sequence[float], *, seed: int):
        assert min(weights) >= 0
        assert max(weights) > 0
        num_sources = len(weights)
        # The largest source must have at least as many rows per period as all other sources can gain by rounding.
        self._period = max(PERIOD, num_sources**2)
        self._units = [max(int(weight > 0), round(weight / sum(weights) * UNIT)) for weight in weights]
        self._largest = int(np.argmax(self._units))
        self._seed = seed
        self._keep_arrangements()

    def __getstate__(self) -> tuple[int, list[int], int, int]:
        return self._period, self._units, self._largest, self._seed

    def __setstate__(self, state: tuple[int, list[int], int, int]) -> None:
        self._period, self._units, self._largest, self._seed = state
        self._keep_arrangements()

    @property
    def fractions(self) -> list[float]:
        """Returns the long-run fraction of each source in the rows."""
        return [units / sum(self._units) for units in self._units]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Returns the source of a row and the number of rows of that source before it."""
        if len(self._units) == 1:
            return 0, row
        period, position = divmod(row, self._period)
        source_of, number_of = self._cached_arrangement(period)
        return int(source_of[position]), int(number_of[position])

    def rows_taken(self, rows: int) -> list[int]:
        """Returns the number of rows of each source among the first `rows` rows."""
        period, position = divmod(rows, self._period)
        source_of, _ = self._cached_arrangement(period)
        within = np.bincount(source_of[:position], minlength=len(self._units)).tolist()
        return [before + count for before, count in zip(self._before(period), within, strict=True)]

    def num_rows(self, source: int) -> int:
        """Returns the number of all rows of a source: 0, or `sys.maxsize` if it is endless."""
        return sys.maxsize if self._units[source] else 0

    def row_of(self, source: int, number: int) -> int:
        """Returns the row of row `number` of a source of positive weight: `self[row_of(s, n)] == (s, n)`."""
        low, high = 0, 1
        while self._before(high)[source] <= number:
            low, high = high, 2 * high
        # Find the last period with at most `number` rows of the source before it.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._before(middle)[source] <= number else (low, middle)
        source_of, number_of = self._cached_arrangement(low)
        return low * self._period + int(np.flatnonzero((source_of == source) & (number_of == number))[0])

    def _keep_arrangements(self) -> None:
        # A batch can span two periods.
        self._cached_arrangement = functools.lru_cache(max(2, NUM_CACHED_ROWS // self._period))(self._arrangement)

    def _before(self, periods: int) -> list[int]:
        """Returns the number of rows of each source in the first `periods` periods."""
        rows = periods * self._period
        counts = [units * rows // UNIT for units in self._units]
        counts[self._largest] += rows - sum(counts)
        return counts

    def _arrangement(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each position of a period, its source and the row number within that source."""
        before = self._before(period)
        counts = np.subtract(self._before(period + 1), before)
        source_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        # NumPy guarantees that raw bits and the stable sort never change between versions, unlike its shuffle.
        bits = np.random.Philox(key=[self._seed, period]).random_raw(self._period)
        source_of = source_of[np.argsort(bits, kind='stable')]
        # Vectorized over the sources: a loop over a thousand sources would take a second.
        by_source = np.argsort(source_of, kind='stable')
        firsts = np.cumsum(counts) - counts
        number_of = np.empty(self._period, np.int64)
        number_of[by_source] = np.arange(self._period) + np.repeat(np.array(before) - firsts, counts)
        return source_of, number_of


class StagedMixture:
    """Mixture whose weights change at given rows. Picklable.

    A source continues in each stage after its last row of the stage before. The methods are those of `Mixture`.

    Args:
        stages: first row and mixture of each stage, in ascending order from row 0. The last stage is endless.
    """

    def __init__(self, stages: Sequence[tuple[int, Mixture]]):
        self._firsts = [first for first, _ in stages]
        self.mixtures = [mixture for _, mixture in stages]
        assert self._firsts[0] == 0
        # For each source, its number of rows before each stage.
        taken = [
            mixture.rows_taken(stop - first)
            for mixture, (first, stop) in zip(self.mixtures, itertools.pairwise(self._firsts), strict=False)
        ]
        num_sources = len(self.mixtures[0].fractions)
        self._before = [
            list(itertools.accumulate((rows[source] for rows in taken), initial=0)) for source in range(num_sources)
        ]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Returns the source of a row and the number of rows of that source before it."""
        stage = bisect.bisect_right(self._firsts, row) - 1
        source, number = self.mixtures[stage][row - self._firsts[stage]]
        return source, self._before[source][stage] + number

    def rows_taken(self, rows: int) -> list[int]:
        """Returns the number of rows of each source among the first `rows` rows."""
        stage = bisect.bisect_right(self._firsts, rows) - 1
        taken = self.mixtures[stage].rows_taken(rows - self._firsts[stage])
        return [before[stage] + count for before, count in zip(self._before, taken, strict=True)]

    def num_rows(self, source: int) -> int:
        """Returns the number of all rows of a source; `sys.maxsize` if it is endless."""
        return max(self._before[source][-1], self.mixtures[-1].num_rows(source))

    def row_of(self, source: int, number: int) -> int:
        """Returns the row of row `number` of a source, which must be below `num_rows`."""
        stage = bisect.bisect_right(self._before[source], number) - 1
        return self._firsts[stage] + self.mixtures[stage].row_of(source, number - self._before[source][stage])
