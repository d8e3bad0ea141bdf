"""Reads local paths and fsspec URLs. Errors are one line without secrets."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from maxlm.storage import regular_files
from maxlm.storage.errors import TransientStorageError, classify_error, redact, storage_errors
from maxlm.storage.object_store import open_filesystem, read_file
from maxlm.storage.regular_files import check_regular, check_size, kind_of, open_descriptor

# Read buffer of local files. fsspec reads ahead by itself.
BUFFER_BYTES = 2**20
# Fields that change with the content of a remote file, the most reliable first: gcsfs, s3fs, http and memory.
VERSION_FIELDS = ('generation', 'ETag', 'etag', 'md5Hash', 'mtime', 'LastModified', 'updated', 'created')
_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')


@dataclasses.dataclass(frozen=True)
class Entry:
    """File or directory.

    Attributes:
        path: local path or URL.
        name: last path component. `walk` returns the path relative to its root, with `/`.
        size: size in bytes; 0 if unknown.
        version: text that changes with the content; '' for directories or if unknown.
        is_directory: True for a directory.
    """

    path: str
    name: str
    size: int
    version: str
    is_directory: bool


def is_url(path: str) -> bool:
    """Returns True if a path is a URL."""
    return _URL.match(path) is not None


def display_path(path: str) -> str:
    """Returns the path for messages: URLs without secrets, local paths unchanged."""
    return redact(path) if is_url(path) else path


def stat(path: str) -> Entry:
    """Returns the entry of a file or directory. Follows links.

    Raises:
        StorageError: the path does not exist, cannot be read, or is a special file such as a FIFO.
    """
    name = display_path(path).rstrip('/').rsplit('/', 1)[-1]
    with storage_errors(path):
        if is_url(path):
            filesystem, root = open_filesystem(path)
            # Listings that this process cached may be outdated.
            filesystem.invalidate_cache()
            return _remote_entry(path, name, filesystem.info(root))
        status = os.stat(path)
        if os.path.isdir(path):
            return Entry(path, name, 0, '', is_directory=True)
        check_regular(path)
        return Entry(path, name, status.st_size, str(status.st_mtime_ns), is_directory=False)


def list_directory(path: str) -> list[Entry]:
    """Returns the entries of a directory, sorted by name. A broken local link is a file of 0 bytes.

    Skips local special files (FIFOs, sockets, devices).

    Raises:
        StorageError: the directory cannot be listed.
    """
    with storage_errors(path):
        if is_url(path):
            filesystem, root = open_filesystem(path)
            infos = {info['name'].rstrip('/'): info for info in filesystem.ls(root, detail=True)}
            # Buckets list an explicitly created directory as an entry of itself.
            infos.pop(root.rstrip('/'), None)
            names = {name.rsplit('/', 1)[-1]: info for name, info in infos.items()}
            return [_remote_entry(_join(path, name), name, names[name]) for name in sorted(names)]
        with os.scandir(path) as entries:
            found = [_local_entry(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
            return [entry for entry in found if entry is not None]


def walk(path: str, *, skip: Callable[[str], bool] = lambda name: False) -> Iterator[Entry]:
    """Yields all files below a directory, in any order. Does not follow local links to directories.

    Skips files and directories, including their contents, whose name satisfies `skip(name)`.

    Raises:
        StorageError: the directory, or one below it, cannot be listed.
    """
    if not is_url(path):
        yield from _walk_local(path, '', skip)
        return
    with storage_errors(path):
        # One flat listing, because listing each directory of an object store would need many requests.
        filesystem, root = open_filesystem(path)
        found = filesystem.find(root, detail=True)
    root = root.rstrip('/') + '/'
    for full_name, info in found.items():
        name = full_name.removeprefix(root)
        if name and not name.endswith('/') and not any(map(skip, name.split('/'))):
            yield _remote_entry(_join(path, name), name, info)


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading and seeking. Use as a context manager.

    Raises:
        StorageError: the file cannot be opened. Reads raise it too if the storage fails.
    """
    with storage_errors(path):
        if is_url(path):
            filesystem, root = open_filesystem(path)
            return io.BufferedReader(_RemoteFile(path, filesystem.open(root, 'rb')), BUFFER_BYTES)
        return io.BufferedReader(_LocalFile(path), BUFFER_BYTES)


def read_bytes(path: str, *, limit: int | None = None) -> bytes:
    """Returns the content of a file. Raises StorageError if it cannot be read, or is larger than `limit` bytes."""
    with storage_errors(path):
        if is_url(path):
            check_size(path, stat(path).size, math.inf if limit is None else limit)
            return read_file(path)
        return regular_files.read_bytes(path, limit=limit)


class _LocalFile(io.FileIO):
    """Local regular file. Read errors name the file."""

    def __init__(self, path: str):
        super().__init__(path, 'rb', opener=open_descriptor)

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise classify_error(str(self.name), error) from error


class _RemoteFile(io.RawIOBase):
    """File of fsspec with its own position. Some file systems return one shared object to all callers.

    If it is read from the beginning to the end, the bytes are compared with the bucket's checksum.
    """

    def __init__(self, path: str, file: Any):
        self._path = path
        self._file = file
        self._position = 0
        # CRC32C of the first bytes. Only Google Cloud Storage reports it for each object.
        details = getattr(file, 'details', None)
        self._details = details if isinstance(details, dict) and details.get('crc32c') else None
        self._crc = self._num_hashed = 0

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
        size = getattr(self._file, 'size', None)
        if isinstance(size, int) and len(content) < min(len(buffer), size - self._position):
            raise TransientStorageError(
                f'{display_path(self._path)}: received {self._position + len(content):,} of {size:,} bytes'
            )
        if self._details and self._position == self._num_hashed:
            self._hash(content)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _hash(self, content: bytes) -> None:
        import google_crc32c  # a dependency of gcsfs

        assert self._details
        self._crc = google_crc32c.extend(self._crc, content)
        self._num_hashed += len(content)
        expected = int.from_bytes(base64.b64decode(self._details['crc32c']))
        if self._num_hashed == self._details['size'] and self._crc != expected:
            raise TransientStorageError(
                f'{display_path(self._path)}: its crc32c differs from that of the received bytes'
            )

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _call(self, read: Callable[[], Any]) -> Any:
        with storage_errors(self._path):
            return read()


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
        status = entry.stat()
    except OSError:
        return Entry(entry.path, entry.name, 0, '', is_directory=False)
    if kind_of(status.st_mode):
        return None
    return Entry(entry.path, entry.name, status.st_size, str(status.st_mtime_ns), is_directory=False)


def _remote_entry(path: str, name: str, info: dict[str, Any]) -> Entry:
    if info['type'] == 'directory':
        return Entry(path, name, 0, '', is_directory=True)
    version = next((info[key] for key in VERSION_FIELDS if info.get(key) not in (None, '')), '')
    if isinstance(version, datetime.datetime):
        version = version.isoformat()
    return Entry(path, name, int(info.get('size') or 0), str(version).strip('"'), is_directory=False)


def _join(directory: str, name: str) -> str:
    return f'{directory.rstrip("/")}/{name}'
