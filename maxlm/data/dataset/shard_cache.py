"""A data set in a bucket, used as if it were on the local disk: its files are fetched ahead of their use.

The fetcher runs in threads of the training process; readers wait for its files, see `maxlm.data.dataset.wait`.
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
from maxlm.data.dataset.records import MANIFEST_NAME
from maxlm.data.dataset.remote_manifest import RemoteManifest, parse_manifest, read_remote_manifest, remove_stale
from maxlm.data.dataset.wait import LOCK_NAME, error_marker
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write
from maxlm.storage.download import ClosedError, RemoteFile, fetch_patiently
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.object_store import read_file
from maxlm.storage.retry import OnWarning, RetryPolicy

# Between two looks of the fetcher at whether what it fetched is still there.
RECHECK_SECONDS = 10.0
# Uses that are looked at before the start, for whether they fit.
CHECKED_USES = 256
# For threads that are in the middle of a request when the fetcher is closed.
CLOSE_SECONDS = 5.0


class Fetcher:
    """Fetches files in the order of their use, ahead of it. Use as a context manager, around what reads the files.

    It goes as far ahead as `capacity_bytes` allow. Files that no present and no planned step reads are deleted when
    their place is needed, those first that were not used for longest; readers that have one open can go on. Files that
    are there in their full size are not fetched again: their checksums were compared when they were fetched. A bucket
    that does not answer is asked again for as long as it takes, with alarms; what is there can be read meanwhile. A
    file that cannot be had leaves the reason to those who wait for it.

    Several fetchers may share a directory; each keeps only its own files within its limit, and fetches anew what
    another has deleted.

    Args:
        uses: in the order of their first steps; may be endless, as the same files return in every epoch.
        capacity_bytes: of all files that are kept, unfinished ones as if they were whole; 0 = unlimited.
        threads: files that are fetched at the same time.
        on_warning: is called, from any thread, what a person should know.
        all_files: all files that `uses` may name: what an earlier run left of them counts, and makes room.
        on_bytes: is told, from any thread, how many bytes more are on the disk; see `fetch_file`.
        wait: sleeps for a number of seconds between tries; None = a sleep that closing ends.

    Raises:
        InputError: some step needs more than `capacity_bytes`; on entering: the cache cannot be written.
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
        # For the planning thread; what `advance` leaves for it is not guarded, that the training loop never waits.
        self._wake = threading.Event()
        self._step = 0
        self._next_end = -1
        self._rechecked = time.monotonic()
        self._error = ''
        # Shared by the threads, and guarded by the condition.
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
            raise InputError(
                f'{error.filename}: {os_message(error)}; give a directory for the cache that can be written'
            ) from error
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the fetching, and the waiting for it; the next fetcher goes on with unfinished files."""
        self._stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            # They are daemons: one that waits for an answer does not keep the process.
            thread.join(max(0.0, deadline - time.monotonic()))
        self._release()

    def advance(self, step: int) -> None:
        """All steps below `step` are consumed: files that only they read may go.

        Raises:
            InputError: the cache cannot be written any more.
        """
        self._step = max(self._step, step)
        if self._step > self._next_end:
            self._wake.set()
        if self._error:
            raise InputError(self._error)

    def _announce(self, directory: Path) -> None:
        """Lets readers of a directory know that there is somebody to wait for."""
        if directory in self._locks:
            return
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        self._locks[directory] = descriptor
        # Readers who look whether it is locked hold it for a moment only.
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
        # A thread that ended without a word would leave readers waiting for ever.
        except Exception as error:
            self._stop_with_error(f'it cannot be told what is to be fetched: {type(error).__name__}: {error}')
            raise

    def _rest(self) -> None:
        self._wake.wait(RECHECK_SECONDS)
        self._wake.clear()
        with self._condition:
            self._catch_up()
            # Not with all news: it looks at every file that is planned.
            if time.monotonic() - self._rechecked > RECHECK_SECONDS:
                self._rechecked = time.monotonic()
                self._policy.requeue_vanished()
                self._condition.notify_all()

    def _catch_up(self) -> None:
        self._policy.advance_to(self._step)
        self._next_end = self._policy.next_end

    def _admit(self, use: PlannedRead) -> bool:
        """Whether the use is dealt with; False = it has to wait."""
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
                state = 'there' if self._fetch(cached.file) else 'failed'
            except ClosedError:
                return
            with self._condition:
                cached.state = state
            self._wake.set()

    def _fetch(self, file: RemoteFile) -> bool:
        try:
            # In a later epoch it is tried again.
            error_marker(file.path).unlink(missing_ok=True)
            fetch_patiently(file, retries=self._retries, closing=self._closing, on_bytes=self._on_bytes)
        except ClosedError:
            raise
        except InputError as error:
            self._record_failure(file, str(error))
            return False
        except Exception as error:
            self._record_failure(file, f'{file.path}: {type(error).__name__} while it was fetched')
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
        """Ends the fetching where those who wait cannot be told why: then they are not to wait."""
        self._error = reason
        self._stop()
        self._release()


def fetch_manifest(url: str, cache: Path, *, on_warning: OnWarning) -> RemoteManifest:
    """Fetches `dataset.json`, tokenizer and chat template of the data set in directory `url` to directory `cache`.

    If the bucket does not answer, those that are in the cache are used, with an alarm. If the data set is another one
    than that in the cache, what is cached of the latter under the same names is removed.

    Raises:
        InputError: they cannot be read, or one is not the one that the manifest means.
    """
    try:
        manifest = read_remote_manifest(url)
        for name, sha256 in manifest.beside.items():
            if _has_checksum(cache / name, sha256):
                continue
            content = read_file(f'{manifest.url}/{name}')
            if hashlib.sha256(content).hexdigest() != sha256:
                raise InputError(
                    f'{redact(manifest.url)}/{name} is not that of {MANIFEST_NAME} beside it: its checksum '
                    f'differs; copy the data set to the bucket again'
                )
            atomic_write(cache / name, content, make_parents=True)
    except TransientStorageError as error:
        try:
            manifest = parse_manifest(url.rstrip('/'), (cache / MANIFEST_NAME).read_bytes())
        except (OSError, InputError):
            raise error from None
        if not all(_has_checksum(cache / name, sha256) for name, sha256 in manifest.beside.items()):
            raise
        on_warning(f'{error}; going on with {MANIFEST_NAME} in {cache}')
        return manifest
    remove_stale(manifest, cache)
    atomic_write(cache / MANIFEST_NAME, manifest.content, make_parents=True)
    return manifest


def _has_checksum(path: Path, sha256: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    except OSError:
        return False
