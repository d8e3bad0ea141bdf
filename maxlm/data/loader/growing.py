"""Batches of data sets that are still being prepared. A step waits until its shards are complete."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.data.dataset.preparation import (
    ManifestVersion,
    is_preparing,
    load_current,
    manifest_version,
    read_progress,
    stop_reason,
)
from maxlm.data.loader.batches import Batches, TrainingRows
from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.source import POLL_SECONDS, REPORT_SECONDS
from maxlm.data.loader.windows import Batch
from maxlm.errors import InputError


class WaitHooks(NamedTuple):
    """Functions that a waiting step calls.

    Attributes:
        report: called once with a message if the wait is long.
        poll: called repeatedly, with True if the preparation has made progress. May raise an exception to end the wait.
    """

    report: Callable[[str], None]
    poll: Callable[[bool], None]


class GrowingBatches:
    """Batches by step of a corpus of which a part is being prepared. Picklable and thread-safe.

    They equal the batches of the complete corpus: see `ShuffledIndex` with `in_order`. Each process reads the partial
    manifests itself.

    Args:
        corpus: the corpus.
        make: returns the batches of the shards that are complete.
    """

    def __init__(self, corpus: TrainingData, make: Callable[[TrainingData], Batches], _marker: str = ''):
        self._make = make
        # Exists until `close`, which also ends the waits of the copies in worker processes.
        if not _marker:
            descriptor, _marker = tempfile.mkstemp(prefix='maxlm-reading-')
            os.close(descriptor)
        self._marker = _marker
        self._lock = threading.Lock()
        self._versions: dict[Path, ManifestVersion] = {}
        self._set(corpus)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._corpus, self._make, self._marker

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Calls the constructor, because locks cannot be pickled.
        self.__init__(*state)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.available)

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step. Waits until its shards are complete.

        Raises:
            InputError: see `wait`; or a shard is damaged.
        """
        return self.wait(step)[step]

    def close(self) -> None:
        """Ends all waits with an error, also those of copies in worker processes."""
        Path(self._marker).unlink(missing_ok=True)

    def wait(self, step: int, hooks: WaitHooks | None = None) -> Batches:
        """Waits until the shards of a step are complete, and returns batches that contain the step.

        Raises:
            InputError: a preparation has failed or stopped, or its shards have changed.
        """
        began, progress, reported = time.monotonic(), '', False
        while True:
            # Without the lock, so that a step whose shards are complete does not wait for a refresh.
            if step < self._num_steps:
                return self.available
            with self._lock:
                # Checked first, so that the shards of a preparation that ends in between are found.
                stopped = self._stopped()
                self._refresh()
                if step < self._num_steps:
                    return self.available
            if stopped and stopped in growing_paths(self._corpus):
                raise InputError(
                    f'step {step + 1} needs more data, but the preparation of {stopped} {stop_reason(stopped)}; '
                    'run the same command again, after restarting maxlm prepare if you started it yourself'
                )
            if hooks:
                before, progress = progress, self._progress()
                hooks.poll(progress != before)
                if not reported and time.monotonic() - began >= REPORT_SECONDS:
                    reported = True
                    names = ', '.join(str(path) for path in growing_paths(self._corpus))
                    hooks.report(f'step {step + 1} waits for the preparation of {names}')
            time.sleep(POLL_SECONDS)
            if not os.path.exists(self._marker):
                raise InputError('the run has ended; start it again to continue')

    def _stopped(self) -> Path | None:
        """Returns a data set that is not complete and whose preparation is not running."""
        return next((path for path in growing_paths(self._corpus) if not is_preparing(path)), None)

    def _progress(self) -> str:
        return str([(read_progress(path), self._versions.get(path)) for path in growing_paths(self._corpus)])

    def _refresh(self) -> None:
        versions = {path: manifest_version(path) for path in growing_paths(self._corpus)}
        if versions != self._versions:
            self._versions = versions
            self._set(refreshed(self._corpus))

    def _set(self, corpus: TrainingData) -> None:
        self._corpus = corpus
        self.available: Batches = self._make(corpus)
        num_rows = complete_rows(corpus, self.available)
        # Set last, because `wait` reads it first.
        self._num_steps = len(self.available) if num_rows is None else self.available.batch_rows.batch_of(num_rows)


def refreshed(corpus: TrainingData) -> TrainingData:
    """Returns the corpus with the shards that are complete now.

    Raises:
        InputError: the data set of a source was replaced by other data.
    """
    loaded = {path: load_current(path) for path in growing_paths(corpus)}
    sources = []
    for source in corpus.sources:
        if source.is_growing:
            before = source
            dataset, is_complete = loaded[source.dataset.path]
            source = dataclasses.replace(source, dataset=dataset, is_growing=not is_complete)
            train = before.shards('train')
            if (
                source.shards('train')[: len(train)] != train
                or source.shards('validation') != before.shards('validation')
                or dataset.order_fingerprint != before.dataset.order_fingerprint
            ):
                raise InputError(f'{dataset.path} was prepared from other data since the run started; use another copy')
        sources.append(source)
    return dataclasses.replace(corpus, sources=tuple(sources))


def growing_paths(corpus: TrainingData) -> list[Path]:
    """Returns the directories of the data sets that are being prepared."""
    return list(dict.fromkeys(source.dataset.path for source in corpus.sources if source.is_growing))


def complete_rows(corpus: TrainingData, batches: Batches) -> int | None:
    """Returns the number of rows, from the first one, that no further shard can change; None = all."""
    order = batches.order
    assert isinstance(order, TrainingRows)
    rows = [
        order.mixture.row_of(number, order.orders[number].complete_windows)
        for number, source in enumerate(corpus.sources)
        if source.is_growing
    ]
    return min(rows, default=None)
