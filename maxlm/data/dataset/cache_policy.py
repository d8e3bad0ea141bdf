"""Eviction policy of the local shard cache, which keeps its files below a limit."""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from maxlm.errors import InputError
from maxlm.storage.download import RemoteFile, remove_partial

# Uses that are planned at most: they are endless, and the disk may not be the limit.
MAX_PLANNED = 1024


@dataclasses.dataclass(frozen=True)
class PlannedRead:
    """The files that steps [first_step, last_step] read."""

    files: tuple[RemoteFile, ...]
    first_step: int
    last_step: int


@dataclasses.dataclass
class CachedFile:
    """A file that has its place on the disk.

    Attributes:
        file: what and where.
        last_step: last of the planned steps that read it; -1 = none is planned.
        state: `left` by an earlier run, whole or in part; `queued`, `fetching`, `there`, or `failed`.
    """

    file: RemoteFile
    last_step: int = -1
    state: str = 'left'


class CachePolicy:
    """The plan of a cache: what is to be fetched next, and what goes for it. For one thread at a time.

    Args:
        capacity_bytes: of all files together, unfinished ones as if they were whole; 0 = unlimited.
    """

    def __init__(self, capacity_bytes: int):
        self._capacity = capacity_bytes
        self._step = 0
        self._files: dict[Path, CachedFile] = {}
        # Last steps of the uses that are planned, as a heap.
        self._planned: list[int] = []
        self.queue: deque[CachedFile] = deque()

    def register(self, file: RemoteFile) -> None:
        """Counts what an earlier run left of a file; what has its name and another size is deleted."""
        if not file.is_there:
            file.path.unlink(missing_ok=True)
        if file.path.exists() or file.partial.exists():
            self._files[file.path] = CachedFile(file)

    def advance_to(self, step: int) -> None:
        """All steps below `step` are consumed."""
        self._step = max(self._step, step)
        while self._planned and self._planned[0] < self._step:
            heapq.heappop(self._planned)

    @property
    def next_end(self) -> int:
        """The step after which something can change: the first at which a planned use ends; -1 = none is planned."""
        return self._planned[0] if self._planned else -1

    def admit(self, use: PlannedRead) -> bool:
        """Plans a use, with room made for it; False = not now: what is there is still needed.

        Raises:
            InputError: a step that is due can never have all its files.
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
        """Fetches again what is needed and has been deleted by somebody else, who may share the cache."""
        for cached in self._files.values():
            if cached.state == 'there' and cached.last_step >= self._step and not self._queue_if_missing(cached):
                # It was its turn before: it is not to wait behind all that is fetched ahead.
                self.queue.rotate()

    def _queue_if_missing(self, cached: CachedFile) -> bool:
        if cached.file.is_there:
            cached.state = 'there'
            return True
        # Of another size it is of no use, and would take the room of what comes.
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
        # What was not used for longest comes first.
        for cached in sorted(unused, key=lambda cached: cached.last_step):
            if size <= self._capacity:
                break
            size -= cached.file.bytes
            self._evict(cached)
        return size <= self._capacity

    def _evict(self, cached: CachedFile) -> None:
        # Whoever has it open can go on reading.
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
    """Raises InputError if the files that some step of `uses` reads do not fit in together.

    `uses` are in the order of their first steps.
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
        f'give it more than that, best twice as much'
    )
