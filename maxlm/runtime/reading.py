"""The batches of a run from a step on, read ahead and, where they lie in a bucket, fetched ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from maxlm.config.keys import Config
from maxlm.data.batches import iterate
from maxlm.data.corpus import Corpus
from maxlm.data.skips import RemainingBatches, data_step
from maxlm.data.windows import Batch
from maxlm.training.decisions import Decisions
from maxlm.training.sharding import Layout


@contextlib.contextmanager
def batches_after(
    start: int, config: Config, decisions: Decisions, *, corpus: Corpus, layout: Layout, alarm: Callable[[str], None]
) -> Iterator[Iterator[Batch]]:
    """While entered, this process's share of the batches of the steps after `start`.

    Args:
        start: number of the last step that is done.
        config: resolved.
        decisions: of the run so far, for what it leaves out.
        corpus: where the batches are from.
        layout: of the run's devices.
        alarm: told of a bucket that does not answer.
    """
    skips, global_batch, num_steps = decisions.skips, config.train.global_batch, config.train.num_steps
    cuts = tuple((data_step(first, skips), config.data.window // window) for first, window in config.contexts)
    data = corpus.train_batches(global_batch, layout.local_rows(global_batch), cuts)
    with (
        corpus.fetcher(data, data_step(start, skips), alarm) as fetcher,
        contextlib.closing(iterate(RemainingBatches(data, skips), start, config.data, num_steps)) as batches,
    ):
        if fetcher is None:
            yield batches
            return

        def make_room() -> Iterator[Batch]:
            for step, batch in enumerate(batches, start):
                # Of what earlier steps read.
                fetcher.advance(data_step(step, skips))
                yield batch

        yield make_room()
