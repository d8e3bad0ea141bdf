"""Position of a run in its data, which continues when the batch size changes."""

from __future__ import annotations

from typing import NamedTuple

from maxlm.data.loader.batch_rows import BatchRows, Changes
from maxlm.data.loader.skipped_batches import Skips, data_index, merged


class Position(NamedTuple):
    """Batch sizes and skipped batches of a run, which determine the rows of its next batches.

    Attributes:
        changes: sizes of the global batch so far.
        skips: batches that the run skips.
    """

    changes: Changes
    skips: Skips

    def after_change(self, step: int, *, before: int, now: int) -> Position:
        """Returns the position of a run that resumes after `step` with batches of `now` rows instead of `before`.

        The next batch begins with the first row that no batch has contained. Batches to skip are converted to those
        that contain their rows.
        """
        batch = data_index(step, self.skips)
        # A second change without a step in between replaces the first one.
        earlier = [change for change in self.changes or ((0, 0, before),) if change[1] < batch]
        changes = (*earlier, (step, batch, now))
        old, new = BatchRows.of(before, self.changes), BatchRows.of(now, changes)
        skips = [
            (start, stop)
            if stop <= batch
            # The last row of the range is in the last skipped batch.
            else (new.batch_of(old.first_row(start)), new.batch_of(old.first_row(stop) - 1) + 1)
            for start, stop in self.skips
        ]
        return Position(changes, merged(skips))
