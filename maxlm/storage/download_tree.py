"""A tree of files in a bucket, copied to a local directory with its folders."""

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
# Ctrl-C is noticed between two looks at what is done.
POLL_SECONDS = 0.1


def list_tree(url: str, directory: Path, *, include: str = '', max_files: int = 0) -> list[RemoteFile]:
    """The files behind a URL, with their places in `directory`, sorted by name.

    A URL is a file, a folder, or a glob (`*`, `?`, `[…]`, and `**` for any folders). Names are relative to the folder,
    or to the folder before the first wildcard; a folder that a glob matches is taken as a whole.

    Args:
        url: any URL of fsspec, or a local path.
        directory: where to.
        include: take only files whose name, or its last component, matches this pattern; '' = all.
        max_files: take at most so many, the first by name; 0 = all.

    Raises:
        InputError: there is nothing, or it may not be listed.
    """
    filesystem, path = open_filesystem(url)
    # In a web address `?` begins the query.
    is_glob = '*' in path if url.startswith('http') else WILDCARDS.search(path) is not None
    root, facts = translate_errors(url, lambda: _expanded(filesystem, path) if is_glob else _found(filesystem, path))
    prefix = url.partition('://')[0] + '://' if '://' in url else ''
    files = []
    for full_name in sorted(facts):
        name = full_name[len(root) :].lstrip('/')
        if facts[full_name]['type'] != 'file' or not name or name.endswith('/'):
            continue
        if {'', '.', '..'} & set(name.split('/')):
            raise InputError(f'{redact(url)}: a file is named {name!r}, which is no name of a local file')
        if include and not (fnmatch.fnmatch(name, include) or fnmatch.fnmatch(PurePosixPath(name).name, include)):
            continue
        there = full_name if full_name.startswith(prefix) else prefix + full_name
        files.append(RemoteFile(there, directory / name, int(facts[full_name]['size'] or 0)))
    if not files:
        raise InputError(f'{redact(url)}: no files' + (f' that match {include}' if include else '') + ' are there')
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
    """Fetches files, `threads` at a time; those that are there in their full size are left as they are.

    A bucket that does not answer is asked again for as long as it takes. Ended by an error or Ctrl-C it leaves what is
    whole, and unfinished files to be gone on with.

    Args:
        files: in the order in which they are begun.
        threads: files at a time.
        last: name of files that are begun when all others are complete; '' = none.
        on_alarm, wait: see `RetryPolicy`; None = a sleep that ends with the fetching.
        on_bytes: is told, from any thread, of bytes that are fetched; see `fetch_file`.
        on_file: is told, from any thread, that a file is there.

    Raises:
        InputError: a file cannot be had; the others that were begun are not waited for.
    """
    for is_last in (False, True):
        part = [file for file in files if (file.path.name == last) == is_last]
        _Pool(part, on_alarm, on_bytes, on_file, wait).run(min(threads, len(part)))


class _Pool:
    """Threads that fetch files. They are daemons: one that waits for an answer does not keep the process."""

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
    """The folder that names are relative to, and facts by full name."""
    facts = filesystem.info(path)
    if facts['type'] == 'file':
        return path.rpartition('/')[0], {path: facts}
    return path.rstrip('/'), filesystem.find(path, detail=True)


def _expanded(filesystem: Any, glob: str) -> tuple[str, dict[str, Any]]:
    first = WILDCARDS.search(glob)
    assert first is not None
    root = glob[: first.start()].rpartition('/')[0]
    facts = filesystem.glob(glob, detail=True)
    for name, fact in list(facts.items()):
        if fact['type'] == 'directory':
            facts |= filesystem.find(name, detail=True)
    return root, facts
