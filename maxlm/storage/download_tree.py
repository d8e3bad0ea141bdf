"""Copies a directory tree from a bucket to a local directory."""

from __future__ import annotations

import fnmatch
import queue
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import tenacity

from maxlm.errors import InputError
from maxlm.storage.download import ClosedError, RemoteFile, fetch_patiently
from maxlm.storage.errors import redact
from maxlm.storage.object_store import open_filesystem, translate_errors
from maxlm.storage.retry import OnWarning, RetryPolicy

WILDCARDS = re.compile(r'[*?[]')
# The main thread polls, so that it notices Ctrl-C.
POLL_SECONDS = 0.1


def list_tree(url: str, directory: Path, *, include: str = '', max_files: int = 0) -> list[RemoteFile]:
    """Lists the files of a URL, with their local paths in `directory`, sorted by name.

    The URL is a file, a directory or a glob (`*`, `?`, `[…]`, and `**` for any directories). Names are relative to the
    directory, or to the directory before the first wildcard. A directory that matches the glob is listed completely.

    Args:
        url: any URL of fsspec, or a local path.
        directory: local destination.
        include: select only files whose name, or its last component, matches this pattern; '' = all.
        max_files: maximum number of files, the first by name; 0 = all.

    Raises:
        InputError: there are no files, or they cannot be listed.
    """
    filesystem, path = open_filesystem(url)
    # `?` starts the query of an HTTP URL.
    is_glob = '*' in path if url.startswith('http') else WILDCARDS.search(path) is not None
    root, entries = translate_errors(url, lambda: _expanded(filesystem, path) if is_glob else _found(filesystem, path))
    prefix = url.partition('://')[0] + '://' if '://' in url else ''
    files = []
    for full_name in sorted(entries):
        name = full_name[len(root) :].lstrip('/')
        if entries[full_name]['type'] != 'file' or not name or name.endswith('/'):
            continue
        if {'', '.', '..'} & set(name.split('/')):
            raise InputError(f'{redact(url)}: file name {name!r} is not a valid local path; rename the file')
        if include and not (fnmatch.fnmatch(name, include) or fnmatch.fnmatch(PurePosixPath(name).name, include)):
            continue
        there = full_name if full_name.startswith(prefix) else prefix + full_name
        files.append(RemoteFile(there, directory / name, int(entries[full_name]['size'] or 0)))
    if not files:
        raise InputError(f'{redact(url)}: no files' + (f' that match {include}' if include else '') + ' found')
    return files[: max_files or len(files)]


def fetch_tree(
    files: Sequence[RemoteFile],
    *,
    threads: int,
    on_alarm: OnWarning,
    last: str = '',
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    on_file: Callable[[], None] = lambda: None,
    wait: Callable[[float], None] | None = None,
) -> None:
    """Fetches files in parallel. Skips local files that have the expected size.

    Requests are retried until the bucket responds. After an error or Ctrl-C, complete files remain, and unfinished
    downloads can be resumed.

    Args:
        files: files in the order in which they are started.
        threads: number of files to fetch in parallel.
        last: name of the files that are started when all other files are complete; '' = none.
        on_alarm, wait: see `RetryPolicy`. Without `wait`, retries sleep until the download ends.
        on_bytes: called from any thread with the number of fetched bytes; see `fetch_file`.
        on_file: called from any thread after each complete file.

    Raises:
        InputError: a file cannot be fetched. Other unfinished downloads are abandoned.
    """
    for is_last in (False, True):
        part = [file for file in files if (file.path.name == last) == is_last]
        _Pool(part, on_alarm, on_bytes, on_file, wait).run(min(threads, len(part)))


class _Pool:
    """Threads that fetch files. They are daemons, so a thread that waits for a response does not block exit."""

    def __init__(
        self,
        files: Sequence[RemoteFile],
        on_alarm: OnWarning,
        on_bytes: Callable[[int], None],
        on_file: Callable[[], None],
        wait: Callable[[float], None] | None,
    ):
        self._closing = threading.Event()
        self._retries = RetryPolicy(on_alarm, wait or tenacity.sleep_using_event(self._closing))
        self._on_bytes = on_bytes
        self._on_file = on_file
        self._errors: list[Exception] = []
        self._queue: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in files:
            self._queue.put(file)

    def run(self, num_threads: int) -> None:
        threads = [threading.Thread(target=self._work, name='fetch', daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and not self._errors:
                threads[0].join(POLL_SECONDS)
                threads = [thread for thread in threads if thread.is_alive()] or threads[:1]
        finally:
            self._closing.set()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                file = self._queue.get_nowait()
                fetch_patiently(file, retries=self._retries, closing=self._closing, on_bytes=self._on_bytes)
                self._on_file()
            except (queue.Empty, ClosedError):
                return
            except Exception as error:
                self._errors.append(error)
                return


def _found(filesystem: Any, path: str) -> tuple[str, dict[str, Any]]:
    """Returns the directory that names are relative to, and the information on its files by full name."""
    info = filesystem.info(path)
    if info['type'] == 'file':
        return path.rpartition('/')[0], {path: info}
    return path.rstrip('/'), filesystem.find(path, detail=True)


def _expanded(filesystem: Any, glob: str) -> tuple[str, dict[str, Any]]:
    first = WILDCARDS.search(glob)
    assert first is not None
    root = glob[: first.start()].rpartition('/')[0]
    entries = filesystem.glob(glob, detail=True)
    for name, entry in list(entries.items()):
        if entry['type'] == 'directory':
            entries |= filesystem.find(name, detail=True)
    return root, entries
