"""Tests that planned reads match the actual reads: they cover each shard of each step, and no additional steps."""

import itertools
import sys
from collections import defaultdict

import pytest

from maxlm.data.loader.batch_rows import BatchRows
from maxlm.data.loader.batches import TrainingRows
from maxlm.data.loader.mixture import Mixture, StagedMixture
from maxlm.data.loader.prefetch_plan import upcoming_reads
from maxlm.data.loader.shuffle import ShuffledIndex

SHARDS = ([30, 5, 0, 41, 22], [7, 9, 4])


MIXTURE = Mixture([0.7, 0.3], seed=2)
# The second source starts in step 10 and ends in step 45.
STAGED = StagedMixture([(0, Mixture([1, 0], seed=2)), (60, MIXTURE), (270, Mixture([1, 0], seed=2))])


@pytest.mark.parametrize('mixture', [MIXTURE, STAGED])
@pytest.mark.parametrize('pool_shards', [0, 1, 2])
@pytest.mark.parametrize('start', [0, 3, 40])
@pytest.mark.parametrize('stages', [((0, 6),), ((0, 4), (3, 9))])
def test_planned_reads_match_the_steps(mixture, pool_shards, start, stages):
    orders = [ShuffledIndex(shards, seed=seed, pool_shards=pool_shards) for seed, shards in enumerate(SHARDS)]
    rows, stop = TrainingRows(mixture, orders), start + 60
    batch_rows = BatchRows(stages)
    firsts = [list(itertools.accumulate(shards, initial=0)) for shards in SHARDS]
    read = defaultdict(set)
    for step in range(start, stop):
        for row in range(batch_rows.first_row(step), batch_rows.first_row(step + 1)):
            part, window = rows.locate(row)
            shard = next(s for s in reversed(range(len(SHARDS[part]))) if firsts[part][s] <= window)
            read[part, step].add(shard)
    planned = list(itertools.takewhile(lambda r: r.first_step < stop, upcoming_reads(rows, batch_rows, start)))
    assert [r.first_step for r in planned] == sorted(r.first_step for r in planned)
    assert planned[0].first_step == start
    for (part, step), shards in read.items():
        covering_reads = [r for r in planned if r.source == part and r.first_step <= step <= r.last_step]
        assert shards <= {shard for r in covering_reads for shard in r.shards}
    for planned_read in planned:
        # The first and last step actually read the shard, so no shard is kept longer than it is used.
        for step in (planned_read.first_step, planned_read.last_step):
            if step < stop:
                assert read[planned_read.source, step] & set(planned_read.shards)
    if pool_shards:
        assert all(len(r.shards) <= pool_shards for r in planned)
        assert max(r.last_step for r in planned) < sys.maxsize
