"""Which source a row of the endless training data is from: weighted, and a pure function of the row's number."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

# Rows over which the shares are as asked, to within a row; longer where there are many sources.
PERIOD = 1024
# Weights are fractions of this: integers, so that every machine counts the same.
UNIT = 2**40
# Rows whose arrangement is kept, in whole periods: those that the batches being read ahead can be in.
NUM_CACHED_ROWS = 64 * PERIOD


class Mixture:
    """row → (source, row of that source). Picklable.

    Rows come in periods. Of the first k periods source s has floor(w_s · k · period) rows, and the source with the
    largest weight has what is left: shares are exact in the long run and off by less than one row per source at the
    end of any period. Within a period the sources are in random order, drawn with (seed, period).

    Args:
        weights: positive; their sum does not matter.
        seed: 0 … 2³² - 1.
    """

    def __init__(self, weights: Sequence[float], *, seed: int):
        assert weights
        assert min(weights) > 0
        num_sources = len(weights)
        # The largest source must have as many rows per period as the others may gain by rounding.
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
        """Share of each source in the rows, in the long run."""
        return [units / sum(self._units) for units in self._units]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """The source of a row, and how many rows of that source were before it."""
        if len(self._units) == 1:
            return 0, row
        period, position = divmod(row, self._period)
        source_of, number_of = self._cached_arrangement(period)
        return int(source_of[position]), int(number_of[position])

    def rows_taken(self, rows: int) -> list[int]:
        """How many of the first `rows` rows are from each source."""
        period, position = divmod(rows, self._period)
        source_of, _ = self._cached_arrangement(period)
        within = np.bincount(source_of[:position], minlength=len(self._units)).tolist()
        return [before + count for before, count in zip(self._before(period), within, strict=True)]

    def row_of(self, source: int, number: int) -> int:
        """The row at which a source has its row `number`: `self[find(s, n)] == (s, n)`."""
        low, high = 0, 1
        while self._before(high)[source] <= number:
            low, high = high, 2 * high
        # The last period before which there are not more than `number`.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._before(middle)[source] <= number else (low, middle)
        source_of, number_of = self._cached_arrangement(low)
        return low * self._period + int(np.flatnonzero((source_of == source) & (number_of == number))[0])

    def _keep_arrangements(self) -> None:
        # Two at least: a batch can be in both.
        self._cached_arrangement = functools.lru_cache(max(2, NUM_CACHED_ROWS // self._period))(self._arrangement)

    def _before(self, periods: int) -> list[int]:
        """Rows of each source in the first `periods` periods."""
        rows = periods * self._period
        counts = [units * rows // UNIT for units in self._units]
        counts[self._largest] += rows - sum(counts)
        return counts

    def _arrangement(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place of a period its source, and the number of the row among that source's."""
        before = self._before(period)
        counts = np.subtract(self._before(period + 1), before)
        source_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        # Raw bits and a stable sort: NumPy promises to keep both from version to version, its own shuffle it does not.
        bits = np.random.Philox(key=[self._seed, period]).random_raw(self._period)
        source_of = source_of[np.argsort(bits, kind='stable')]
        # In one go over all sources: of a thousand, each with a look at every place, it would be a second.
        by_source = np.argsort(source_of, kind='stable')
        firsts = np.cumsum(counts) - counts
        number_of = np.empty(self._period, np.int64)
        number_of[by_source] = np.arange(self._period) + np.repeat(np.array(before) - firsts, counts)
        return source_of, number_of
