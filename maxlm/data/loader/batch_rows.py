"""Rows of the data order in each batch, for runs whose batch size changes when they resume."""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

# (first step, first batch, rows per batch) from the start of a run and from each change of its batch size on. Steps and
# batches differ by the skipped batches. () if the size has never changed.
Changes = tuple[tuple[int, int, int], ...]


class BatchRows(NamedTuple):
    """Maps batches to rows of the data order. Each batch begins after the last row of the batch before it.

    Attributes:
        stages: (first batch, rows per batch) of each stage, in ascending order from batch 0. The last is endless.
    """

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, global_batch: int, changes: Changes = ()) -> BatchRows:
        """Returns the rows of a run that has batches of `global_batch` rows now."""
        return cls(tuple((first, size) for _, first, size in changes) or ((0, global_batch),))

    def first_row(self, batch: int) -> int:
        """Returns the first row of a batch: the number of rows in all batches before it."""
        return sum(size * (min(stop, batch) - first) for first, stop, size in self._ranges() if first < batch)

    def batch_of(self, row: int) -> int:
        """Returns the batch that contains a row: the number of batches that end before it."""
        for first, stop, size in self._ranges():
            batch = first + row // size
            if batch < stop:
                return batch
            row -= size * (stop - first)
        raise AssertionError('the last stage is endless')

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Returns (first batch, stop, rows per batch) of each stage."""
        return [
            (first, stop, size) for (first, size), (stop, _) in itertools.pairwise([*self.stages, (sys.maxsize, 0)])
        ]


def sequences_after(step: int, global_batch: int, changes: Changes) -> int:
    """Returns the number of sequences in the first `step` steps of a run."""
    return BatchRows(tuple((first, size) for first, _, size in changes) or ((0, global_batch),)).first_row(step)


def trained_before(changes: Changes) -> tuple[int, int]:
    """Returns the number of steps and of sequences before the last change of the batch size."""
    if not changes:
        return 0, 0
    step, _, _ = changes[-1]
    return step, sequences_after(step, 0, changes)
