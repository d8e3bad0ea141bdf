"""Which shards the steps ahead will read, so that they can be fetched before and given up afterwards."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from maxlm.data.loader.batches import TrainingRows


class ShardRead(NamedTuple):
    """Steps [first_step, last_step] read these shards of a part, and no other of it."""

    first_step: int
    last_step: int
    source: int
    shards: tuple[int, ...]


def upcoming_reads(rows: TrainingRows, global_batch: int, start_step: int) -> Iterator[ShardRead]:
    """All readings from `start_step` on, without end, by first step."""

    def reads_of_source(source: int) -> Iterator[ShardRead]:
        start = rows.mixture.rows_taken(start_step * global_batch)[source]
        for block in rows.orders[source].blocks(start):
            first = rows.mixture.row_of(source, max(block.start, start))
            last = rows.mixture.row_of(source, block.stop - 1)
            yield ShardRead(first // global_batch, last // global_batch, source, block.shards)

    return heapq.merge(*map(reads_of_source, range(len(rows.orders))), key=lambda reading: reading.first_step)
