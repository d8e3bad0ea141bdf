"""Local cache of a data set in a bucket. Files are fetched before they are used.

The fetcher runs in threads of the training process. Readers wait for its files: see `maxlm.data.dataset.wait`.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import tenacity

from maxlm.data.dataset.cache_policy import CachedFile, CachePolicy, PlannedRead, check_capacity
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.remote_manifest import RemoteManifest, parse_manifest, read_remote_manifest, remove_stale
from maxlm.data.dataset.wait import LOCK_NAME, error_marker
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write
from maxlm.storage.download import ClosedError, RemoteFile, fetch_patiently
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.object_store import read_file
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes
from maxlm.storage.retry import OnWarning, RetryPolicy

# Interval of the check for files that another process has deleted.
RECHECK_SECONDS = 10.0
# Number of planned reads that are checked against the capacity before the start.
CHECKED_USES = 256
# Time that threads have to finish a request when the fetcher closes.
CLOSE_SECONDS = 5.0


class Fetcher:
    """Prefetches files in the order of use. Use it as a context manager around the readers.

    `capacity_bytes` limits prefetching. If space is needed, files that no current or planned step reads are deleted,
    the least recently used first. Readers that have such a file open can continue. Local files of full size are not
    fetched again: their checksums were verified after the download. If the bucket does not respond, requests are
    retried without a limit, with warnings. Local files stay readable meanwhile. If a file cannot be fetched, its
    readers raise an error.

    Several fetchers may share a directory. Each limits only its own files and fetches files again that another fetcher
    has deleted.

    Args:
        uses: planned reads, ordered by first step. May be infinite, because the files return in every epoch.
        capacity_bytes: limit of the total size, where partial files count with their full size; 0 = unlimited.
        threads: number of concurrent downloads.
        on_warning: called from any thread with a message for the user.
        all_files: all files that `uses` may contain. Files of earlier runs count towards the limit and can be evicted.
        on_bytes: called from any thread with the change of the number of bytes on disk; see `fetch_file`.
        wait: sleeps for a number of seconds between attempts; None = a sleep that `close` interrupts.

    Raises:
        InputError: a step needs more than `capacity_bytes`, or the cache cannot be written.
    """

    def __init__(
        self,
        uses: Iterable[PlannedRead],
        *,
        on_warning: OnWarning,
        capacity_bytes: int = 0,
        threads: int = 8,
        all_files: Iterable[RemoteFile] = (),
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
        wait: Callable[[float], None] | None = None,
    ):
        self._on_warning = on_warning
        self._on_bytes = on_bytes
        self._closing = threading.Event()
        self._retries = RetryPolicy(on_warning, wait or tenacity.sleep_using_event(self._closing))
        uses = iter(uses)
        first_uses = list(itertools.islice(uses, CHECKED_USES))
        if capacity_bytes:
            check_capacity(first_uses, capacity_bytes)
        self._uses = itertools.chain(first_uses, uses)
        files = itertools.chain(all_files, *(use.files for use in first_uses))
        self._all_files = {file.path: file for file in files}
        # Inputs of the planning thread. `advance` sets them without a lock, so the training loop never waits.
        self._wake = threading.Event()
        self._step = 0
        self._next_end = -1
        self._rechecked = time.monotonic()
        self._error = ''
        # Shared state, guarded by the condition.
        self._condition = threading.Condition()
        self._policy = CachePolicy(capacity_bytes)
        self._locks: dict[Path, int] = {}
        self._threads = [
            threading.Thread(target=target, name='fetch', daemon=True)
            for target in [self._plan, *[self._run] * threads]
        ]

    def __enter__(self) -> Fetcher:
        try:
            for file in self._all_files.values():
                self._announce(file.path.parent)
                error_marker(file.path).unlink(missing_ok=True)
                self._policy.register(file)
        except OSError as error:
            self._release()
            raise InputError(f'{error.filename}: {os_message(error)}; use a writable cache directory') from error
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops fetching and releases waiting readers. The next fetcher resumes partial files."""
        self._stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            # Daemon threads do not keep the process alive while they wait for a response.
            thread.join(max(0.0, deadline - time.monotonic()))
        self._release()

    def advance(self, step: int) -> None:
        """Marks all steps below `step` as completed, so that files that only they read can be evicted.

        Raises:
            InputError: the cache can no longer be written.
        """
        self._step = max(self._step, step)
        if self._step > self._next_end:
            self._wake.set()
        if self._error:
            raise InputError(self._error)

    def _announce(self, directory: Path) -> None:
        """Locks a directory to signal its readers that a fetcher is running."""
        if directory in self._locks:
            return
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._locks[directory] = descriptor
        # Readers that test the lock hold it only for a moment.
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def _release(self) -> None:
        while self._locks:
            _, descriptor = self._locks.popitem()
            os.close(descriptor)

    def _stop(self) -> None:
        with self._condition:
            self._closing.set()
            self._wake.set()
            self._condition.notify_all()

    def _plan(self) -> None:
        try:
            for use in self._uses:
                while not self._admit(use):
                    self._rest()
                if self._closing.is_set():
                    return
            while not self._closing.is_set():
                self._rest()
        # If the thread ended silently, readers would wait forever.
        except Exception as error:
            self._stop_with_error(f'cannot determine which files to fetch: {type(error).__name__}: {error}')
            raise

    def _rest(self) -> None:
        self._wake.wait(RECHECK_SECONDS)
        self._wake.clear()
        with self._condition:
            self._catch_up()
            # This check reads the status of every planned file, so it only runs at intervals.
            if time.monotonic() - self._rechecked > RECHECK_SECONDS:
                self._rechecked = time.monotonic()
                self._policy.requeue_vanished()
                self._condition.notify_all()

    def _catch_up(self) -> None:
        self._policy.advance_to(self._step)
        self._next_end = self._policy.next_end

    def _admit(self, use: PlannedRead) -> bool:
        """Returns True if the read is planned or has failed; False if it must wait."""
        if self._closing.is_set():
            return True
        with self._condition:
            self._catch_up()
            try:
                for file in use.files:
                    self._announce(file.path.parent)
                admitted = self._policy.admit(use)
            except (InputError, OSError) as error:
                reason = f'{error.filename}: {os_message(error)}' if isinstance(error, OSError) else str(error)
                for file in use.files:
                    self._record_failure(file, reason)
                return True
            self._catch_up()
            self._condition.notify_all()
        return admitted

    def _run(self) -> None:
        while (cached := self._next()) is not None:
            try:
                state = 'complete' if self._fetch(cached.file) else 'failed'
            except ClosedError:
                return
            with self._condition:
                cached.state = state
            self._wake.set()

    def _fetch(self, file: RemoteFile) -> bool:
        try:
            # An error of an earlier epoch is not final.
            error_marker(file.path).unlink(missing_ok=True)
            fetch_patiently(file, retries=self._retries, closing=self._closing, on_bytes=self._on_bytes)
        except ClosedError:
            raise
        except InputError as error:
            self._record_failure(file, str(error))
            return False
        except Exception as error:
            self._record_failure(file, f'{file.path}: {type(error).__name__} during the fetch')
            return False
        return True

    def _next(self) -> CachedFile | None:
        with self._condition:
            while not self._policy.queue and not self._closing.is_set():
                self._condition.wait()
            if self._closing.is_set():
                return None
            cached = self._policy.queue.popleft()
            cached.state = 'fetching'
            return cached

    def _record_failure(self, file: RemoteFile, reason: str) -> None:
        self._on_warning(reason)
        try:
            atomic_write(error_marker(file.path), reason.encode(), make_parents=True)
        except InputError as error:
            self._stop_with_error(f'{error}; {reason}')

    def _stop_with_error(self, reason: str) -> None:
        """Stops the fetcher if an error cannot be recorded for the readers. Releasing the locks ends their wait."""
        self._error = reason
        self._stop()
        self._release()


def fetch_manifest(url: str, cache: Path, *, on_warning: OnWarning) -> RemoteManifest:
    """Downloads `dataset.json`, tokenizer and chat template of the data set in directory `url` to directory `cache`.

    If the bucket does not respond, the cached files are used, with a warning. If the cache contains another data set,
    its shards of the same names are removed.

    Raises:
        InputError: a file cannot be read, or its checksum differs from the manifest.
        TransientStorageError: the bucket does not respond, and the cache does not contain all files.
    """
    try:
        manifest = read_remote_manifest(url)
        for name, sha256 in manifest.tokenizer_checksums.items():
            if _has_checksum(cache / name, sha256):
                continue
            content = read_file(f'{manifest.url}/{name}')
            if hashlib.sha256(content).hexdigest() != sha256:
                raise InputError(
                    f'{redact(manifest.url)}/{name} does not match its {MANIFEST_NAME}: its checksum '
                    f'differs; copy the data set to the bucket again'
                )
            atomic_write(cache / name, content, make_parents=True)
    except TransientStorageError as error:
        try:
            manifest = parse_manifest(url.rstrip('/'), read_bytes(cache / MANIFEST_NAME, limit=MAX_TEXT_BYTES))
        except (OSError, InputError):
            raise error from None
        if not all(_has_checksum(cache / name, sha256) for name, sha256 in manifest.tokenizer_checksums.items()):
            raise
        on_warning(f'{error}; using {MANIFEST_NAME} in {cache}')
        return manifest
    remove_stale(manifest, cache)
    atomic_write(cache / MANIFEST_NAME, manifest.content, make_parents=True)
    return manifest


def _has_checksum(path: Path, sha256: str) -> bool:
    try:
        return hashlib.sha256(read_bytes(path, limit=MAX_TEXT_BYTES)).hexdigest() == sha256
    except OSError:
        return False
