"""Eviction policy of the local shard cache, which keeps its files below a limit."""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from maxlm.errors import InputError
from maxlm.storage.download import RemoteFile, remove_partial

# Maximum number of planned reads. Their iterator may be infinite and the disk unlimited.
MAX_PLANNED = 1024


@dataclasses.dataclass(frozen=True)
class PlannedRead:
    """Files that the steps [first_step, last_step] read."""

    files: tuple[RemoteFile, ...]
    first_step: int
    last_step: int


@dataclasses.dataclass
class CachedFile:
    """A file in the cache.

    Attributes:
        file: the remote file and its local path.
        last_step: last planned step that reads the file; -1 = no planned step.
        state: `leftover` (complete or partial, from an earlier run), `queued`, `fetching`, `complete` or `failed`.
    """

    file: RemoteFile
    last_step: int = -1
    state: str = 'leftover'


class CachePolicy:
    """Decides which files are fetched next and which files are evicted. Not thread-safe.

    Args:
        capacity_bytes: limit of the total size, where partial files count with their full size; 0 = unlimited.
    """

    def __init__(self, capacity_bytes: int):
        self._capacity = capacity_bytes
        self._step = 0
        self._files: dict[Path, CachedFile] = {}
        # Heap of the last steps of the planned reads.
        self._planned: list[int] = []
        self.queue: deque[CachedFile] = deque()

    def register(self, file: RemoteFile) -> None:
        """Registers a file of an earlier run. Deletes a local file of a different size."""
        if not file.is_complete:
            file.path.unlink(missing_ok=True)
        if file.path.exists() or file.partial.exists():
            self._files[file.path] = CachedFile(file)

    def advance_to(self, step: int) -> None:
        """Marks all steps below `step` as completed."""
        self._step = max(self._step, step)
        while self._planned and self._planned[0] < self._step:
            heapq.heappop(self._planned)

    @property
    def next_end(self) -> int:
        """First step at which a planned read ends; -1 = none. The plan cannot change before this step is completed."""
        return self._planned[0] if self._planned else -1

    def admit(self, use: PlannedRead) -> bool:
        """Plans a read and evicts unused files for it.

        Returns:
            True if the read is planned or in the past. False if the files that are still needed leave no space for it,
            or if MAX_PLANNED reads are planned.

        Raises:
            InputError: the files of the current step do not fit into the cache.
        """
        if use.last_step < self._step:
            return True
        if len(self._planned) >= MAX_PLANNED:
            return False
        if self._capacity and not self._free_space(use):
            if use.first_step <= self._step:
                self._check_fits(use)
            return False
        heapq.heappush(self._planned, use.last_step)
        for file in use.files:
            cached = self._files.setdefault(file.path, CachedFile(file))
            cached.last_step = max(cached.last_step, use.last_step)
            if cached.state not in ('queued', 'fetching'):
                self._queue_if_missing(cached)
        return True

    def requeue_vanished(self) -> None:
        """Queues needed files again that another process has deleted from a shared cache."""
        for cached in self._files.values():
            if cached.state == 'complete' and cached.last_step >= self._step and not self._queue_if_missing(cached):
                # The file is needed before all files that are prefetched, so it moves to the front of the queue.
                self.queue.rotate()

    def _queue_if_missing(self, cached: CachedFile) -> bool:
        if cached.file.is_complete:
            cached.state = 'complete'
            return True
        # A file of a different size is useless and takes up space.
        cached.file.path.unlink(missing_ok=True)
        cached.state = 'queued'
        self.queue.append(cached)
        return False

    def _free_space(self, use: PlannedRead) -> bool:
        needed = {file.path: file.bytes for file in use.files}
        size = sum(({path: cached.file.bytes for path, cached in self._files.items()} | needed).values())
        unused = [
            cached
            for path, cached in self._files.items()
            if cached.last_step < self._step and cached.state != 'fetching' and path not in needed
        ]
        # Least recently used files come first.
        for cached in sorted(unused, key=lambda cached: cached.last_step):
            if size <= self._capacity:
                break
            size -= cached.file.bytes
            self._evict(cached)
        return size <= self._capacity

    def _evict(self, cached: CachedFile) -> None:
        # Processes that have the file open can continue to read it.
        cached.file.path.unlink(missing_ok=True)
        remove_partial(cached.file)
        if cached.state == 'queued':
            self.queue.remove(cached)
        del self._files[cached.file.path]

    def _check_fits(self, use: PlannedRead) -> None:
        needed = {path: cached.file.bytes for path, cached in self._files.items() if cached.last_step >= self._step}
        needed |= {file.path: file.bytes for file in use.files}
        if sum(needed.values()) > self._capacity:
            raise InputError(_too_small(self._capacity, use.first_step, sum(needed.values())))


def check_capacity(uses: Sequence[PlannedRead], capacity_bytes: int) -> None:
    """Raises InputError if the files that one step reads do not fit into the cache together.

    Args:
        uses: planned reads, ordered by first step.
        capacity_bytes: limit of the total size.
    """
    active: list[PlannedRead] = []
    worst = (0, 0)
    for use in uses:
        active = [earlier for earlier in active if earlier.last_step >= use.first_step] + [use]
        needed = {file.path: file.bytes for one in active for file in one.files}
        worst = max(worst, (sum(needed.values()), use.first_step))
    if worst[0] > capacity_bytes:
        raise InputError(_too_small(capacity_bytes, worst[1], worst[0]))


def _too_small(capacity_bytes: int, step: int, needed: int) -> str:
    return (
        f'a cache of {capacity_bytes:,} bytes is too small: step {step:,} reads files of {needed:,} bytes; '
        f'raise the limit, preferably to twice that size'
    )
