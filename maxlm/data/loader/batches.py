"""Batches by step: shuffled rows, sharded over hosts and prefetched."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from maxlm.config.schema import DataConfig
from maxlm.data.chat.scored_tokens import with_scored_tokens
from maxlm.data.executors.local_executor import blocked_terminal_signals
from maxlm.data.loader.batch_rows import BatchRows, Changes
from maxlm.data.loader.mixture import Mixture, StagedMixture
from maxlm.data.loader.shuffle import ShuffledIndex, feistel_permutation
from maxlm.data.loader.teacher_outputs import TeacherOutputReader
from maxlm.data.loader.windows import Batch, Sequences
from maxlm.errors import InputError
from maxlm.log import logger


@dataclasses.dataclass(frozen=True)
class WeightedSource:
    """Windows of one split.

    Attributes:
        windows: the windows.
        names: for each shard of `windows`, the number of the source under which its loss is reported.
    """

    windows: Sequences
    names: Sequence[int]


class RowOrder(Protocol):
    """Order of the windows of all sources.

    `locate` maps a row number to (source, window of that source), or to None after the last row.
    """

    def __len__(self) -> int: ...

    def locate(self, row: int) -> tuple[int, int] | None: ...


class TrainingRows:
    """Endless rows of a weighted mixture of sources. Each source is reshuffled every epoch."""

    def __init__(self, mixture: Mixture | StagedMixture, orders: Sequence[ShuffledIndex]):
        self.mixture = mixture
        self.orders = orders

    def __len__(self) -> int:
        return sys.maxsize

    def locate(self, row: int) -> tuple[int, int]:
        source, position = self.mixture[row]
        return source, self.orders[source][position]


class ValidationRows:
    """Each window of all sources once, in a fixed order. There must be at least one window."""

    def __init__(self, num_windows: Sequence[int]):
        self._firsts = list(itertools.accumulate(num_windows, initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def locate(self, row: int) -> tuple[int, int] | None:
        if row >= len(self):
            return None
        number = feistel_permutation(row, len(self), seed=0)
        source = bisect.bisect_right(self._firsts, number) - 1
        return source, number - self._firsts[source]


class Batches:
    """Batches of windows by step: a pure function of (windows, order, step). Picklable.

    `batches[step]` is a dict of arrays [rows, T] (see `window_batch`). With `with_sources` it also contains `sources`,
    int32 [rows]: the number of the source of each row. Row r of the global batch is row `first_row(step) + r` of the
    order; see `BatchRows`. The last batch is padded with rows of weight 0.

    Args:
        sources: the sources of the windows. All have the same window length and tokenizer.
        order: order of the windows of all sources.
        global_batch: number of windows in a batch over all hosts.
        rows: rows of the global batch for this host; None = all. They do not depend on the rows of other hosts.
        with_sources: add the sources of the rows to the batches.
        num_batches: maximum number of batches; 0 = all.
        seq_len_schedule: (first step, number of splits) entries in ascending order; () = windows are rows. A window
            split into n gives n rows of T = window / n tokens, so the number of tokens in a batch does not change.
        teacher: stored outputs of a teacher for the windows of the only source, which are added to the batches.
        batch_sizes: earlier sizes of the global batch; see `BatchRows.of`.
        with_scored: add the tokens at which a reward model scores answers; see `with_scored_tokens`.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        order: RowOrder,
        *,
        global_batch: int,
        rows: slice | None = None,
        with_sources: bool = False,
        num_batches: int = 0,
        seq_len_schedule: Sequence[tuple[int, int]] = (),
        teacher: TeacherOutputReader | None = None,
        batch_sizes: Changes = (),
        with_scored: bool = False,
    ):
        self._sources = sources
        self._teacher = teacher
        self.order = order
        self.global_batch, self.batch_rows = global_batch, BatchRows.of(global_batch, batch_sizes)
        self._rows = range(global_batch)[rows or slice(None)]
        self._with_sources, self._with_scored = with_sources, with_scored
        self._context_schedule = seq_len_schedule
        available = -(-len(order) // global_batch)
        self._length = min(available, num_batches or available, sys.maxsize // global_batch)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step.

        Raises:
            IndexError: the step is not below the number of batches.
            InputError: a shard is damaged.
        """
        if not 0 <= step < len(self):
            raise IndexError(step)
        first = self.batch_rows.first_row(step)
        positions = [self.order.locate(first + row) for row in self._rows]
        # A stream of one token has a target but no input, so it gives a row of padding.
        streams = [
            np.zeros(1, np.int32) if position is None else self._sources[position[0]].windows.stream(position[1])
            for position in positions
        ]
        num_splits = self._num_splits(step)
        batch = self._sources[0].windows.batch(streams, num_splits=num_splits)
        if self._with_scored:
            batch = with_scored_tokens(batch, self._sources[0].windows.end_of_document)
        if self._teacher:
            batch |= self._teacher.batch([None if position is None else position[1] for position in positions])
        if self._with_sources:
            sources = [0 if position is None else self._source(*position) for position in positions]
            batch['sources'] = np.repeat(np.array(sources, np.int32), num_splits)
        return batch

    def _source(self, source: int, window: int) -> int:
        return self._sources[source].names[self._sources[source].windows.shard_of(window)]

    def _num_splits(self, step: int) -> int:
        num_splits = 1
        for first_step, splits in self._context_schedule:
            if first_step <= step:
                num_splits = splits
        return num_splits


class StepIndexedBatches(Protocol):
    """Batches by step; `Batches` implements it."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int) -> Batch: ...


def iterate(
    batches: StepIndexedBatches, start_step: int, data: DataConfig, stop_step: int | None = None
) -> Generator[Batch, None, None]:
    """Yields the batches of steps [start_step, stop_step), prefetched by threads or worker processes.

    `data.num_threads` threads read batches, in each of `data.num_workers` worker processes if there are any. The order
    depends on neither. Closing the iterator (`.close()`, or garbage collection) ends threads and processes. Exceptions
    of a step, including InputError, are raised when that step is reached.
    """
    steps = grain.MapDataset.source(batches)[start_step:stop_step].to_iter_dataset(
        grain.ReadOptions(num_threads=data.num_threads, prefetch_buffer_size=data.prefetch_buffer_size)
    )
    if data.num_workers > 0:
        if not flags.FLAGS.is_parsed():
            # Grain passes its absl flags to the workers, so they must count as parsed. maxlm does not use absl's
            # parsing.
            flags.FLAGS.mark_as_parsed()
        # Use a pipe: shared memory is scarce in containers (64 MB by default), and Grain leaks the last batches there.
        by_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        steps = grain.experimental.WithOptionsIterDataset(steps, by_pipe)
        steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=data.num_workers))
    with contextlib.closing(iter(steps)) as iterator:
        # The first batch starts the worker processes.
        with blocked_terminal_signals() if data.num_workers > 0 else contextlib.nullcontext():
            first = list(itertools.islice(iterator, 1))
        yield from itertools.chain(first, iterator)


def check_same_data(stored: Mapping[str, Any], present: Mapping[str, Any], *, allow_dataset_change: bool) -> None:
    """Checks that the data order is unchanged, because the step is the position in the data only for the same order.

    Raises:
        InputError: it has changed.
    """
    changes = fingerprint_changes(dict(stored), dict(present))
    if changes and not allow_dataset_change:
        raise InputError(
            f'the run cannot resume with different data: {changes}; restore the previous data, use a new workdir, or '
            f'set data.allow_dataset_change=True to continue at the same step of the new data order'
        )
    if changes:
        logger.warning(f'resuming with different data (data.allow_dataset_change=True): {changes}')


def fingerprint_changes(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Returns the differences between two results of `TrainingData.fingerprint` as text; '' if they are equal."""
    return '; '.join(
        f'{name} was {stored.get(name)!r} and is {present.get(name)!r}'
        for name in {**stored, **present}
        if stored.get(name) != present.get(name)
    )
