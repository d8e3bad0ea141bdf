"""Weighted mixture of sources: maps a row of the endless training data to its source as a pure function."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

# Number of rows per period. Shares are exact to within a row per period. Many sources need longer periods.
PERIOD = 1024
# Weights are integer fractions of this, so that the result is identical on all machines.
UNIT = 2**40
# Number of rows with cached arrangements, in complete periods; they cover the batches that are being prefetched.
NUM_CACHED_ROWS = 64 * PERIOD


class Mixture:
    """Maps a row to (source, row of that source). Picklable.

    Rows are grouped in periods. The first k periods contain floor(w_s · k · period) rows of source s; the source with
    the largest weight gets the remaining rows. Shares are exact in the long run and off by less than one row per source
    at the end of any period. Within a period the order of the sources is random, seeded with (seed, period).

    Args:
        weights: positive weights; they need not sum to 1.
        seed: integer from 0 to 2³² - 1.
    """

    def __init__(self, weights: Sequence[float], *, seed: int):
        assert weights
        assert min(weights) > 0
        num_sources = len(weights)
        # The largest source must have at least as many rows per period as all other sources can gain by rounding.
        self._period = max(PERIOD, num_sources**2)
        self._units = [max(1, round(weight / sum(weights) * UNIT)) for weight in weights]
        self._largest = int(np.argmax(self._units))
        self._seed = seed
        self._keep_arrangements()

    def __getstate__(self) -> tuple[int, list[int], int, int]:
        return self._period, self._units, self._largest, self._seed

    def __setstate__(self, state: tuple[int, list[int], int, int]) -> None:
        self._period, self._units, self._largest, self._seed = state
        self._keep_arrangements()

    @property
    def shares(self) -> list[float]:
        """Returns the long-run share of each source in the rows."""
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

    def row_of(self, source: int, number: int) -> int:
        """Returns the row of row `number` of a source: `self[row_of(s, n)] == (s, n)`."""
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
