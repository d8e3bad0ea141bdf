"""Predicts the shards that upcoming steps read, so that they can be prefetched and evicted in time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.data.loader.batch_rows import BatchRows
from maxlm.data.loader.batches import TrainingRows


class ShardRead(NamedTuple):
    """Shards of a source read by the steps [first_step, last_step]. These steps read no other shards of the source."""

    first_step: int
    last_step: int
    source: int
    shards: tuple[int, ...]


def upcoming_reads(rows: TrainingRows, batch_rows: BatchRows, start_step: int) -> Iterator[ShardRead]:
    """Yields all shard reads from `start_step` on, in the order of their first step. They are endless."""

    def reads_of_source(source: int) -> Iterator[ShardRead]:
        start = rows.mixture.rows_taken(batch_rows.first_row(start_step))[source]
        # A source whose last weight is 0 has an end.
        stop = rows.mixture.num_rows(source)
        for block in itertools.takewhile(
            lambda block: max(block.start, start) < stop, rows.orders[source].blocks(start)
        ):
            first = rows.mixture.row_of(source, max(block.start, start))
            last = rows.mixture.row_of(source, min(block.stop, stop) - 1)
            yield ShardRead(batch_rows.batch_of(first), batch_rows.batch_of(last), source, block.shards)

    return heapq.merge(*map(reads_of_source, range(len(rows.orders))), key=lambda reading: reading.first_step)
