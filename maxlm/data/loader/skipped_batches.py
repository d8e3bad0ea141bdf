"""Batches that a run leaves out: from the number of a step to that of its batch."""

from __future__ import annotations

from maxlm.data.loader.batches import Batches
from maxlm.data.loader.windows import Batch

# Ranges [start, stop) of batches in the data's own order, from the first to the last, with gaps in between.
Skips = tuple[tuple[int, int], ...]


def data_index(step: int, skips: Skips) -> int:
    """The batch of step number `step`, both from 0. It rises with the step."""
    for start, stop in skips:
        if step < start:
            break
        step += stop - start
    return step


def skip_steps(skips: Skips, first: int, stop: int) -> Skips:
    """The ranges with the batches of the steps [first, stop), which until now had batches."""
    assert 0 <= first < stop, (first, stop)
    ranges = sorted([*skips, (data_index(first, skips), data_index(stop - 1, skips) + 1)])
    merged = ranges[:1]
    for start, end in ranges[1:]:
        before_start, before_end = merged[-1]
        if start <= before_end:
            merged[-1] = before_start, max(before_end, end)
        else:
            merged.append((start, end))
    return tuple(merged)


class SkippingBatches:
    """Batches by step, without those that are left out. Picklable."""

    def __init__(self, batches: Batches, skips: Skips):
        self._batches = batches
        self._skips = skips

    def __len__(self) -> int:
        return len(self._batches) - sum(stop - start for start, stop in self._skips)

    def __getitem__(self, step: int) -> Batch:
        return self._batches[data_index(step, self._skips)]
