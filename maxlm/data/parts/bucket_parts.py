"""Coordinator's view of a data set that several machines write to a bucket."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from maxlm.data.executors.executor import Task
from maxlm.data.parts.bucket_task import BucketTask, fetch_object
from maxlm.data.parts.part_store import WORK_DIRECTORY, PartTask, lost_file
from maxlm.storage.bucket import Bucket, Listed
from maxlm.storage.errors import redact
from maxlm.workdir.bucket_steps import upload_file
from maxlm.workdir.upload_directory import retry_requests

# Number of files that are fetched concurrently, because each request to a bucket is slow.
THREADS = 16
# A request for each of these files is faster than a list of all files.
FEW_FILES = 8
ADVICE = 'finished partitions are kept: run the same command again'

R = TypeVar('R')
T = TypeVar('T', bound=PartTask)


class BucketParts:
    """Files of a data set in a bucket. See `PartStore`.

    Attributes:
        url: URL of the data set.
        directory: local copy of the small files. It is empty at the start.
    """

    def __init__(self, url: str, directory: Path):
        self.url = url.rstrip('/')
        self.directory = directory
        self._bucket = Bucket(self.url)
        # Versions of the local copies by name.
        self._copies: dict[str, Listed] = {}

    def contains(self, name: str) -> bool:
        """Returns True if a file exists in the bucket."""
        return self._request(functools.partial(self._bucket.list_one, name)) is not None

    def unfinished(self, tasks: Sequence[T]) -> list[T]:
        """See `PartStore`."""
        listed = self._request(self._bucket.list)
        self._fetch([task.result_name for task in tasks if task.result_name in listed], listed)

        def is_done(task: T) -> bool:
            files = task.files() if task.result_name in listed else None
            return files is not None and all(name in listed and listed[name].size == files[name] for name in files)

        return [task for task in tasks if not is_done(task)]

    def collect(self, tasks: Sequence[PartTask]) -> None:
        """See `PartStore`."""
        for task in self.unfinished(tasks):
            raise lost_file(f'{redact(self.url)}/{task.result_name}')

    def portable(self, task: PartTask) -> Task:
        """See `PartStore`."""
        return BucketTask(self.url, task)

    def fetch(self, names: Iterable[str]) -> None:
        """See `PartStore`."""
        names = [*names]
        if len(names) <= FEW_FILES:
            found = {name: self._request(functools.partial(self._bucket.list_one, name)) for name in names}
            listed = {name: each for name, each in found.items() if each is not None}
        else:
            listed = self._request(self._bucket.list)
        self._fetch(names, listed)

    def publish(self, names: Iterable[str]) -> None:
        """See `PartStore`. Deletes the files that `directory` lacks from the bucket."""
        for name in names:
            if (self.directory / name).exists():
                self._request(functools.partial(upload_file, self._bucket, name, self.directory / name))
            else:
                self._request(functools.partial(self._bucket.delete, [name]))

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """See `PartStore`."""
        listed = self._request(self._bucket.list)
        for name, size in sizes.items():
            if name not in listed or listed[name].size != size:
                raise lost_file(f'{redact(self.url)}/{name}')

    def remove_others(self, kept: Collection[str], is_ours: Callable[[str], bool]) -> None:
        """Deletes all files for which `is_ours` returns True unless `kept` contains them, and the temporary files last.

        Does nothing without temporary files, because then an earlier call was not interrupted.
        """
        listed = self._request(self._bucket.list)
        temporary = [name for name in listed if name.startswith(f'{WORK_DIRECTORY}/')]
        if temporary:
            others = [name for name in listed if is_ours(name) and name not in kept]
            for names in (others, temporary):
                self._in_threads(lambda name: self._bucket.delete([name]), names)

    def _fetch(self, names: Sequence[str], listed: dict[str, Listed]) -> None:
        def fetch(name: str) -> None:
            found = listed.get(name)
            if found is None or self._copies.get(name) != found or not (self.directory / name).exists():
                fetch_object(self._bucket, name, self.directory, found)
            if found is not None:
                self._copies[name] = found

        self._in_threads(fetch, names)

    def _in_threads(self, call: Callable[[str], object], names: Sequence[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            # The list raises the first error.
            list(pool.map(lambda name: self._request(functools.partial(call, name)), names))

    def _request(self, request: Callable[[], R]) -> R:
        return retry_requests(self.url, request, advice=ADVICE)
