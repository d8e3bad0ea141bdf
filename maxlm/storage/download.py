"""Downloads a file from a bucket: resumes, verifies the checksum, and renames the complete file."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from maxlm.errors import InputError, explain_os_errors
from maxlm.storage.atomic import replace_file
from maxlm.storage.errors import TransientStorageError, redact
from maxlm.storage.object_store import (
    Checksum,
    digest,
    open_filesystem,
    read_checksum,
    read_range,
    translate_errors,
)
from maxlm.storage.regular_files import open_descriptor
from maxlm.storage.retry import RetryPolicy

# Size of a request, held in memory. Large enough that the latency of a request is a small part of its time.
CHUNK_BYTES = 2**23
# Poll interval for a file that another process is fetching.
LOCK_POLL_SECONDS = 0.2

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """File of a bucket and its local path.

    Attributes:
        url: any URL of fsspec.
        path: local path of the file.
        bytes: size of the file.
        sha256: SHA-256 in hexadecimal. If it is '', the bucket's own checksum or version is compared.
    """

    url: str
    path: Path
    bytes: int
    sha256: str = ''

    @property
    def partial(self) -> Path:
        """Path of the partial download."""
        return self.path.with_name(f'.{self.path.name}.partial')

    @property
    def is_complete(self) -> bool:
        """True if the local file has the expected size. Its checksum was verified when it was fetched."""
        try:
            return self.path.stat().st_size == self.bytes
        except OSError:
            return False


class ClosedError(Exception):
    """The fetcher is closed. Ends its threads."""


class Call(Protocol):
    """Runs a request, possibly with retries."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


def call_once(request: Callable[[], T]) -> T:
    """Returns the result of `request`. Implements `Call` without retries."""
    return request()


def fetch_file(
    file: RemoteFile,
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    call: Call = call_once,
) -> None:
    """Fetches a missing file. Resumes an unfinished download.

    The file is written as `.NAME.partial`. It is renamed when it is complete, verified and synced. If its checksum is
    wrong, it is fetched once more. If several processes fetch the same file, one downloads it and the others wait.

    Args:
        file: the file to fetch.
        on_bytes: called with the number of bytes added, including those of an earlier run. The number is negative when
            bytes are discarded. An exception that it raises ends the download. The partial file is kept.
        call: runs each request, for example with retries.

    Raises:
        InputError: the file cannot be read or written, or its checksum is wrong twice.
        TransientStorageError: the bucket does not respond.
    """
    with explain_os_errors(f'{file.path}: cannot be written', 'check permissions and disk space'):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_partial(file) as partial:
            if partial is not None:
                _fetch(file, partial, on_bytes, call)


def fetch_patiently(
    file: RemoteFile, *, retries: RetryPolicy, closing: threading.Event, on_bytes: Callable[[int], None]
) -> None:
    """Fetches a file in one of several threads. Retries while the bucket does not respond, until `closing` is set.

    Raises:
        InputError: the file cannot be fetched.
        ClosedError: `closing` is set.
    """

    def end_if_closed() -> None:
        if closing.is_set():
            raise ClosedError

    def note_bytes(num_bytes: int) -> None:
        on_bytes(num_bytes)
        end_if_closed()

    def call(request: Callable[[], T]) -> T:
        def attempt() -> T:
            end_if_closed()
            try:
                return request()
            except TransientStorageError:
                # Raise ClosedError now instead of warning and waiting for a retry.
                end_if_closed()
                raise

        return retries.call(file.url, attempt)

    fetch_file(file, on_bytes=note_bytes, call=call)


@contextlib.contextmanager
def _locked_partial(file: RemoteFile) -> Iterator[int | None]:
    """Yields a descriptor of the locked partial file, or None if another process has fetched the file."""
    while not file.is_complete:
        descriptor = open_descriptor(file.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
                continue
            if not _is_same_file(descriptor, file.partial):
                # The previous lock holder renamed or removed it.
                continue
            if file.is_complete:
                file.partial.unlink()
                break
            try:
                yield descriptor
            finally:
                # Do not leave an empty partial file after a failed download.
                if not os.fstat(descriptor).st_size and _is_same_file(descriptor, file.partial):
                    file.partial.unlink()
            return
        finally:
            os.close(descriptor)
    yield None


def remove_partial(file: RemoteFile) -> None:
    """Removes the partial download of a file, unless a process is fetching it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = open_descriptor(file.partial, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, file.partial):
                file.partial.unlink()
                _version_path(file).unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _fetch(file: RemoteFile, partial: int, on_bytes: Callable[[int], None], call: Call) -> None:
    filesystem, path = open_filesystem(file.url)

    def request(read: Callable[[], T]) -> T:
        return call(functools.partial(translate_errors, file.url, read))

    for last_try in (False, True):
        checksum = Checksum('sha256', file.sha256)
        if not file.sha256:
            checksum = request(functools.partial(read_checksum, filesystem, path))
        start = _resumable_bytes(file, partial, checksum)
        os.ftruncate(partial, start)
        on_bytes(start)
        while start < file.bytes:
            stop = min(start + CHUNK_BYTES, file.bytes)
            # A proxy may cut one response.
            for _ in range(2):
                content = request(functools.partial(read_range, filesystem, path, start, stop))
                if len(content) == stop - start:
                    break
            if len(content) != stop - start:
                raise InputError(
                    f'{redact(file.url)}: requested bytes {start} to {stop} but received {len(content)} bytes; the '
                    f'file does not have {file.bytes} bytes, or the server does not support range requests; '
                    'use another server'
                )
            _write_at(partial, content, start)
            start = stop
            on_bytes(len(content))
        os.fsync(partial)
        with file.partial.open('rb') as written:
            actual = digest(iter(functools.partial(written.read, CHUNK_BYTES), b''), checksum.kind)
        # If there is only a version, check that it has not changed since the first bytes were read.
        later = request(functools.partial(read_checksum, filesystem, path)) if checksum.version else checksum
        if actual == checksum.value and later == checksum:
            os.replace(file.partial, file.path)
            _version_path(file).unlink(missing_ok=True)
            return
        os.ftruncate(partial, 0)
        on_bytes(-file.bytes)
        if last_try:
            found = f'is {actual}, not {checksum.value}' if actual != checksum.value else 'changes during the download'
            raise InputError(
                f'{redact(file.url)}: download damaged in two attempts: its {checksum.kind or "version"} {found}; '
                'run the same command again'
            )


def _write_at(descriptor: int, content: bytes, start: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _resumable_bytes(file: RemoteFile, partial: int, checksum: Checksum) -> int:
    """Returns the number of bytes of the partial file that can be kept."""
    start = os.fstat(partial).st_size
    if start > file.bytes:
        start = 0
    if checksum.version:
        # Without a checksum, only the version shows that the first bytes belong to another version of the file.
        version = _version_path(file)
        if start and (not version.exists() or version.read_text(encoding='utf-8') != checksum.version):
            start = 0
        replace_file(version, checksum.version)
    return start


def _version_path(file: RemoteFile) -> Path:
    return file.path.with_name(f'.{file.path.name}.version')
