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
    part: int
    shards: tuple[int, ...]


def upcoming_reads(rows: TrainingRows, global_batch: int, start_step: int) -> Iterator[ShardRead]:
    """All readings from `start_step` on, without end, by first step."""

    def of_part(part: int) -> Iterator[ShardRead]:
        start = rows.mixture.served(start_step * global_batch)[part]
        for span in rows.orders[part].spans(start):
            first = rows.mixture.find(part, max(span.start, start))
            last = rows.mixture.find(part, span.stop - 1)
            yield ShardRead(first // global_batch, last // global_batch, part, span.shards)

    return heapq.merge(*map(of_part, range(len(rows.orders))), key=lambda reading: reading.first_step)
