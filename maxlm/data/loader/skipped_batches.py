"""Batches that a run skips: maps the number of a step to the number of its batch."""

from __future__ import annotations

from collections.abc import Iterable

from maxlm.data.loader.batches import StepIndexedBatches
from maxlm.data.loader.windows import Batch

# Ranges [start, stop) of batches in data order, sorted and separated by gaps.
Skips = tuple[tuple[int, int], ...]


def data_index(step: int, skips: Skips) -> int:
    """Returns the batch of step number `step`, both counted from 0. It increases with the step."""
    for start, stop in skips:
        if step < start:
            break
        step += stop - start
    return step


def skip_steps(skips: Skips, first: int, stop: int) -> Skips:
    """Returns the skipped ranges extended by the batches of steps [first, stop)."""
    assert 0 <= first < stop, (first, stop)
    return merged([*skips, (data_index(first, skips), data_index(stop - 1, skips) + 1)])


def merged(ranges: Iterable[tuple[int, int]]) -> Skips:
    """Returns ranges sorted, with those that overlap or touch merged."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


class SkippingBatches:
    """Batches by step without the skipped batches. Picklable."""

    def __init__(self, batches: StepIndexedBatches, skips: Skips):
        self._batches = batches
        self._skips = skips

    def __len__(self) -> int:
        return len(self._batches) - sum(stop - start for start, stop in self._skips)

    def __getitem__(self, step: int) -> Batch:
        return self._batches[data_index(step, self._skips)]
