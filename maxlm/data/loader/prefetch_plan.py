"""Predicts the shards that upcoming steps read, so that they can be prefetched and evicted in time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.data.loader.batches import TrainingRows


class ShardRead(NamedTuple):
    """Shards of a source read by the steps [first_step, last_step]. These steps read no other shards of the source."""

    first_step: int
    last_step: int
    source: int
    shards: tuple[int, ...]


def upcoming_reads(rows: TrainingRows, global_batch: int, start_step: int) -> Iterator[ShardRead]:
    """Yields all shard reads from `start_step` on, in the order of their first step. They are endless."""

    def reads_of_source(source: int) -> Iterator[ShardRead]:
        start = rows.mixture.rows_taken(start_step * global_batch)[source]
        # A source whose last weight is 0 has an end.
        stop = rows.mixture.num_rows(source)
        for block in itertools.takewhile(
            lambda block: max(block.start, start) < stop, rows.orders[source].blocks(start)
        ):
            first = rows.mixture.row_of(source, max(block.start, start))
            last = rows.mixture.row_of(source, min(block.stop, stop) - 1)
            yield ShardRead(first // global_batch, last // global_batch, source, block.shards)

    return heapq.merge(*map(reads_of_source, range(len(rows.orders))), key=lambda reading: reading.first_step)
