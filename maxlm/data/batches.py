"""Batches by step: shuffled, cut to a host's rows, read ahead."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

import grain
import numpy as np
from absl import flags

from maxlm.config.keys import DataConfig
from maxlm.data.records import Dataset
from maxlm.data.windows import Windows
from maxlm.errors import InputError

Batch = dict[str, np.ndarray]

# Odd, so that different seeds stay different modulo 2³².
SEED_STRIDE = 0x9E3779B1


class Batches:
    """Batches of windows by step: a pure function of (windows, seed, step). Picklable.

    `batches[step]` is a dict of arrays [rows, T] (see Windows). Row r of the global batch is window number
    `step * global_batch + r` of the shuffled windows. Endless batches shuffle anew in every epoch; the others end with
    the last window, and the last batch is filled up with rows of weight 0.

    Args:
        windows: at least one.
        global_batch: rows of a batch over all hosts.
        seed: 0 … 2³² - 1.
        endless: whether epochs follow each other without end.
        rows: those of the global batch that this host wants; None = all. The other hosts do not change them.
        num_batches: at most so many; 0 = all.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        global_batch: int,
        seed: int,
        endless: bool,
        rows: slice | None = None,
        num_batches: int = 0,
    ):
        assert len(windows) > 0
        self._global_batch = global_batch
        self._rows = range(global_batch)[rows or slice(None)]
        self._num_windows = len(windows)
        # grain computes each place of the permutation: nothing as long as the data set is held in memory. It adds the
        # epoch to the seed, so seeds are spread: else epoch 1 of seed 0 were epoch 0 of seed 1.
        self._windows = grain.MapDataset.source(windows).shuffle(seed=seed * SEED_STRIDE % 2**32)
        if endless:
            self._windows = self._windows.repeat()
        self._endless = endless
        available = sys.maxsize // global_batch if self._endless else -(-self._num_windows // global_batch)
        self._length = min(available, num_batches or available)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> Batch:
        """Raises IndexError beyond the last batch, InputError when a shard is damaged."""
        if not 0 <= step < len(self):
            raise IndexError(step)
        rows = [self._row(step * self._global_batch + row) for row in self._rows]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, number: int) -> dict[str, np.ndarray]:
        if self._endless or number < self._num_windows:
            return self._windows[number]
        return {name: np.zeros_like(values) for name, values in self._windows[0].items()}


def train_batches(dataset: Dataset, data: DataConfig, global_batch: int, rows: slice | None = None) -> Batches:
    """The shuffled, endless batches of the train split.

    Raises:
        InputError: the split is empty.
    """
    return Batches(_windows(dataset, 'train', data), global_batch=global_batch, seed=data.seed, endless=True, rows=rows)


def validation_batches(
    dataset: Dataset, data: DataConfig, global_batch: int, num_batches: int = 0, rows: slice | None = None
) -> Batches:
    """Batches of the validation split, each window at most once; 0 = all of them.

    Fewer are a sample of the whole split, always the same one, whatever the run's seed.

    Raises:
        InputError: the split is empty.
    """
    windows = _windows(dataset, 'validation', data)
    return Batches(windows, global_batch=global_batch, seed=0, endless=False, rows=rows, num_batches=num_batches)


def iterate(
    batches: Batches, start_step: int, data: DataConfig, stop_step: int | None = None
) -> Generator[Batch, None, None]:
    """The batches of steps [start_step, stop_step), read ahead by `data.threads` or by `data.workers` processes.

    The order depends on neither. Closing the iterator (`.close()`, or dropping it) ends threads and processes. What a
    step raises, InputError included, is raised here in its turn.
    """
    steps = grain.MapDataset.source(batches)[start_step:stop_step].to_iter_dataset(
        grain.ReadOptions(num_threads=data.threads, prefetch_buffer_size=data.prefetch)
    )
    if data.workers > 0:
        if not flags.FLAGS.is_parsed():
            # grain hands its absl flags to the workers; maxlm has no use for absl's own parsing.
            flags.FLAGS.mark_as_parsed()
        # By pipe: shared memory is scarce in containers (64 MB by default), and grain leaves the last batches in it.
        by_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        steps = grain.experimental.WithOptionsIterDataset(steps, by_pipe)
        steps = steps.mp_prefetch(grain.MultiprocessingOptions(num_workers=data.workers))
    with contextlib.closing(iter(steps)) as iterator:
        yield from iterator


def fingerprint(dataset: Dataset, data: DataConfig, global_batch: int) -> dict[str, object]:
    """All that the order of the data depends on, for a checkpoint: flat and JSON-able."""
    return {
        'dataset': dataset.fingerprint,
        'window': data.window,
        'seed': data.seed,
        'isolate_documents': data.isolate_documents,
        'global_batch': global_batch,
    }


def check_fingerprint(stored: dict[str, object], present: dict[str, object]) -> None:
    """Raises InputError naming what changed since `stored`: the step would no longer tell the position in the data."""
    changes = [
        f'{name} was {stored.get(name)!r} and is {present.get(name)!r}'
        for name in {**stored, **present}
        if stored.get(name) != present.get(name)
    ]
    if changes:
        raise InputError(
            f'the run cannot go on with other data: {"; ".join(changes)}; put it back, or use a new workdir'
        )


def _windows(dataset: Dataset, split: str, data: DataConfig) -> Windows:
    windows = Windows(dataset, split, data.window, isolate_documents=data.isolate_documents)
    if len(windows) == 0:
        raise InputError(f'{dataset.path}: the {split} split is empty; maxlm.prepare needs more text for it')
    return windows
