"""Reads local paths and URLs of all file systems that fsspec knows. Errors are one line without secrets."""

from __future__ import annotations

import dataclasses
import datetime
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from maxlm.storage.errors import classify_error, redact
from maxlm.storage.object_store import open_filesystem
from maxlm.storage.regular_files import NotRegularError, check_regular, check_size, kind_of, open_descriptor

# Bytes that a local file is read by; fsspec reads buckets ahead by itself.
BUFFER_BYTES = 2**20
# Facts that change when a remote file does, the surest first; the names are those of gcsfs, s3fs, http, memory.
VERSION_FACTS = ('generation', 'ETag', 'etag', 'md5Hash', 'mtime', 'LastModified', 'updated', 'created')
_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file or a directory.

    Attributes:
        path: local path or URL.
        name: last component; from `walk` the path below the directory that was walked, with `/`.
        size: bytes; 0 where the storage does not say.
        version: changes when the content does; '' for directories and where the storage does not say.
        is_directory: whether it has entries of its own.
    """

    path: str
    name: str
    size: int
    version: str
    is_directory: bool


def is_url(path: str) -> bool:
    """Whether a path is a URL, and not local."""
    return _URL.match(path) is not None


def display_path(path: str) -> str:
    """Returns a path as messages may show it: a URL without secrets."""
    return redact(path) if is_url(path) else path


def stat(path: str) -> Entry:
    """Facts of a file or directory; links are followed.

    Raises:
        StorageError: there is none, it may not be looked at, or it is a special file, e.g. a FIFO.
    """
    name = display_path(path).rstrip('/').rsplit('/', 1)[-1]
    try:
        if is_url(path):
            filesystem, root = open_filesystem(path)
            # What this process has listed before may have changed since.
            filesystem.invalidate_cache()
            return _remote_entry(path, name, filesystem.info(root))
        facts = os.stat(path)
        if os.path.isdir(path):
            return Entry(path, name, 0, '', is_directory=True)
        check_regular(path)
        return Entry(path, name, facts.st_size, str(facts.st_mtime_ns), is_directory=False)
    except Exception as error:
        raise classify_error(path, error) from error


def list_directory(path: str) -> list[Entry]:
    """The entries of a directory, sorted by name. A local link that leads nowhere is a file of 0 bytes.

    Local special files (FIFOs, sockets, devices) are left out.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        if is_url(path):
            filesystem, root = open_filesystem(path)
            facts = {fact['name'].rstrip('/'): fact for fact in filesystem.ls(root, detail=True)}
            # Buckets list a directory that was made by hand as an entry of itself.
            facts.pop(root.rstrip('/'), None)
            names = {name.rsplit('/', 1)[-1]: fact for name, fact in facts.items()}
            return [_remote_entry(_join(path, name), name, names[name]) for name in sorted(names)]
        with os.scandir(path) as entries:
            found = [_local_entry(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
            return [entry for entry in found if entry is not None]
    except Exception as error:
        raise classify_error(path, error) from error


def walk(path: str, *, skip: Callable[[str], bool] = lambda name: False) -> Iterator[Entry]:
    """All files below a directory, in no order that is promised. Local directories that are links are not entered.

    `skip(name)` tells of the name of a file or directory whether it is left out, with all that is below it.

    Raises:
        StorageError: the directory, or one below it, cannot be listed.
    """
    if not is_url(path):
        yield from _walk_local(path, '', skip)
        return
    try:
        # One flat listing: object stores have no directories, and asking for each of them would be many requests.
        filesystem, root = open_filesystem(path)
        found = filesystem.find(root, detail=True)
    except Exception as error:
        raise classify_error(path, error) from error
    root = root.rstrip('/') + '/'
    for full_name, facts in found.items():
        name = full_name.removeprefix(root)
        if name and not name.endswith('/') and not any(map(skip, name.split('/'))):
            yield _remote_entry(_join(path, name), name, facts)


def open_file(path: str) -> BinaryIO:
    """Opens a file to read and seek in. Use as a context manager.

    Raises:
        StorageError: it cannot be opened; reading raises it too, when the storage fails meanwhile.
    """
    try:
        if is_url(path):
            filesystem, root = open_filesystem(path)
            return io.BufferedReader(_RemoteFile(path, filesystem.open(root, 'rb')), BUFFER_BYTES)
        return io.BufferedReader(_LocalFile(path), BUFFER_BYTES)
    except Exception as error:
        raise classify_error(path, error) from error


def read_bytes(path: str, *, limit: int | None = None) -> bytes:
    """Returns the whole content of a file. Raises StorageError if it cannot be read, or has more than `limit` bytes."""
    with open_file(path) as file:
        if limit is not None:
            try:
                check_size(path, file.seek(0, os.SEEK_END), limit)
            except NotRegularError as error:
                raise classify_error(path, error) from error
            file.seek(0)
        return file.read()


class _LocalFile(io.FileIO):
    """A local regular file whose failing reads say which file it was."""

    def __init__(self, path: str):
        super().__init__(path, 'rb', opener=open_descriptor)

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise classify_error(str(self.name), error) from error


class _RemoteFile(io.RawIOBase):
    """A file of fsspec with a position of its own: some file systems hand out one object to all who open a file."""

    def __init__(self, path: str, file: Any):
        self._path = path
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self._call(lambda: self._file.seek(0, os.SEEK_END))
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        def read() -> bytes:
            self._file.seek(self._position)
            return self._file.read(len(buffer))

        content = self._call(read)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _call(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:
            raise classify_error(self._path, error) from error


def _walk_local(directory: str, below: str, skip: Callable[[str], bool]) -> Iterator[Entry]:
    for entry in list_directory(directory):
        if skip(entry.name):
            continue
        name = below + entry.name
        if not entry.is_directory:
            yield dataclasses.replace(entry, name=name)
        elif not os.path.islink(entry.path):
            yield from _walk_local(entry.path, f'{name}/', skip)


def _local_entry(entry: os.DirEntry[str]) -> Entry | None:
    if entry.is_dir():
        return Entry(entry.path, entry.name, 0, '', is_directory=True)
    try:
        facts = entry.stat()
    except OSError:
        return Entry(entry.path, entry.name, 0, '', is_directory=False)
    if kind_of(facts.st_mode):
        return None
    return Entry(entry.path, entry.name, facts.st_size, str(facts.st_mtime_ns), is_directory=False)


def _remote_entry(path: str, name: str, facts: dict[str, Any]) -> Entry:
    if facts['type'] == 'directory':
        return Entry(path, name, 0, '', is_directory=True)
    version = next((facts[key] for key in VERSION_FACTS if facts.get(key) not in (None, '')), '')
    if isinstance(version, datetime.datetime):
        version = version.isoformat()
    return Entry(path, name, int(facts.get('size') or 0), str(version).strip('"'), is_directory=False)


def _join(directory: str, name: str) -> str:
    return f'{directory.rstrip("/")}/{name}'
