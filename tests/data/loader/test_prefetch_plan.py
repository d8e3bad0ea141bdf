"""Announced reads match the actual reads: each shard of each step, and no step longer than necessary."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict

import pytest

from maxlm.data.loader.batches import TrainingRows
from maxlm.data.loader.mixture import Mixture
from maxlm.data.loader.prefetch_plan import upcoming_reads
from maxlm.data.loader.shuffle import ShuffledIndex

SHARDS = ([30, 5, 0, 41, 22], [7, 9, 4])


@pytest.mark.parametrize('pool_shards', [0, 1, 2])
@pytest.mark.parametrize('start', [0, 3, 40])
def test_readings_are_what_the_steps_read(pool_shards, start):
    orders = [ShuffledIndex(shards, seed=seed, pool_shards=pool_shards) for seed, shards in enumerate(SHARDS)]
    rows, batch, stop = TrainingRows(Mixture([0.7, 0.3], seed=2), orders), 6, start + 60
    firsts = [list(itertools.accumulate(shards, initial=0)) for shards in SHARDS]
    read = defaultdict(set)
    for step in range(start, stop):
        for row in range(step * batch, (step + 1) * batch):
            part, window = rows.locate(row)
            shard = next(s for s in reversed(range(len(SHARDS[part]))) if firsts[part][s] <= window)
            read[part, step].add(shard)
    announced = list(itertools.takewhile(lambda r: r.first_step < stop, upcoming_reads(rows, batch, start)))
    assert [r.first_step for r in announced] == sorted(r.first_step for r in announced)
    assert announced[0].first_step == start
    for (part, step), shards in read.items():
        covering = [r for r in announced if r.source == part and r.first_step <= step <= r.last_step]
        assert shards <= {shard for r in covering for shard in r.shards}
    for reading in announced:
        # The first and last step actually read the shard, so no shard is kept longer than it is used.
        for step in (reading.first_step, reading.last_step):
            if step < stop:
                assert read[reading.source, step] & set(reading.shards)
    if pool_shards:
        assert all(len(r.shards) <= pool_shards for r in announced)
        assert max(r.last_step for r in announced) < sys.maxsize
