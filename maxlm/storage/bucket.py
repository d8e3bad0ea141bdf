"""Object operations below a bucket URL: list, read, write, delete. Errors are one line without secrets."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxlm.storage.errors import TransientStorageError, classify_error, redact, short_message
from maxlm.storage.object_store import open_filesystem, read_range, read_verified

# Part size of large uploads. Small parts give frequent progress and cheap retries.
PART_BYTES = 2**24
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html: at most 10,000 parts.
MOST_PARTS = 9_000
READ_BYTES = 2**20

T = TypeVar('T')


class BucketError(TransientStorageError):
    """A bucket request failed: an outage, or a permission that may still be granted."""


# Remedies of a PermissionDeniedError. A refused request for metadata has no text that names the reason.
ACCESS_REMEDY = 'check the bucket and its region, the credentials and their permissions, and the clock'


class PermissionDeniedError(BucketError):
    """The bucket refused a request: bad credentials, missing permissions or a missing bucket. Retries do not help."""


class Listed(NamedTuple):
    """Listed object.

    Attributes:
        size: size in bytes.
        digest: digest reported by the bucket (MD5, or S3's ETag), or '' if it reports none.
    """

    size: int
    digest: str


class LocalFile(NamedTuple):
    """Local file to upload.

    Attributes:
        path: path of the file.
        size: size in bytes.
        sha256: SHA-256 of its content in hexadecimal.
        digest: digest that the bucket will report.
    """

    path: Path
    size: int
    sha256: str
    digest: str


class Bucket:
    """Objects below a URL."""

    def __init__(self, url: str):
        """
        Raises:
            InputError: the protocol is unknown, or a package is missing.
        """
        self.url = url.rstrip('/')
        self._filesystem, root = open_filesystem(self.url)
        self._root = root.rstrip('/')
        # S3's ETags of encrypted objects are not MD5. The client's own checksum protects uploads to S3.
        self.has_md5_digests = self.url.startswith(('gs://', 'gcs://'))

    def list(self, prefix: str = '') -> dict[str, Listed]:
        """Lists all objects below `prefix/`, or below the URL.

        Raises:
            BucketError: the objects cannot be listed.
        """
        below = f'{self._root}/{prefix}'.rstrip('/')
        found: dict[str, dict[str, Any]] = self._request(
            prefix, lambda: self._filesystem.find(below, detail=True, withdirs=False)
        )
        return {name.removeprefix(f'{self._root}/'): _listed(info) for name, info in found.items()}

    def list_one(self, name: str) -> Listed | None:
        """Returns one object, or None if it does not exist. Raises BucketError if the request fails."""

        def look_up() -> Listed | None:
            try:
                return _listed(self._filesystem.info(f'{self._root}/{name}'))
            except FileNotFoundError:
                return None

        return self._request(name, look_up)

    def read(self, name: str) -> bytes:
        """Returns the content of an object. Raises BucketError if it cannot be read."""
        read = functools.partial(read_verified, self._filesystem, f'{self._root}/{name}', f'{self.url}/{name}')
        return self._request(name, read)

    def sha256(self, name: str, size: int) -> str:
        """Reads an object in parts and returns its SHA-256. Raises BucketError if it cannot be read."""
        digest = hashlib.sha256()
        for start in range(0, size, PART_BYTES):
            read = functools.partial(
                read_range, self._filesystem, f'{self._root}/{name}', start, min(start + PART_BYTES, size)
            )
            digest.update(self._request(name, read))
        return digest.hexdigest()

    def put(self, name: str, content: bytes) -> None:
        """Writes a small object. Raises BucketError if it cannot be written."""
        self._request(name, lambda: self._filesystem.pipe_file(f'{self._root}/{name}', content))

    def put_file(self, name: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Uploads a file. The object becomes visible when it is complete.

        Raises:
            BucketError: the object cannot be written.
            FileNotFoundError: the local file does not exist.
        """
        import fsspec.callbacks  # slow to import

        class ProgressCallback(fsspec.callbacks.Callback):
            def call(self, *_: Any, **__: Any) -> None:
                # fsspec also calls this when it learns the size, before it sends data.
                if self.value:
                    on_bytes(self.value)

        size = path.stat().st_size
        self._request(
            name,
            lambda: self._filesystem.put_file(
                str(path), f'{self._root}/{name}', chunksize=_part_bytes(size), callback=ProgressCallback()
            ),
        )

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects one after the other. Ignores missing objects. Raises BucketError if a deletion fails."""
        for name in names:
            self._request(name, functools.partial(self._remove, f'{self._root}/{name}'))

    def describe(self, path: Path) -> LocalFile:
        """Reads a local file once and computes its digests.

        Raises:
            OSError: the file cannot be read.
        """
        size = path.stat().st_size
        sha256, md5 = hashlib.sha256(), hashlib.md5()
        in_parts = self.url.startswith('s3') and size >= 2 * _part_bytes(size)
        parts: list[bytes] = []
        with path.open('rb') as file:
            left = _part_bytes(size)
            while content := file.read(min(left, READ_BYTES) if in_parts else READ_BYTES):
                sha256.update(content)
                md5.update(content)
                left -= len(content)
                if in_parts and not left:
                    parts.append(md5.digest())
                    md5, left = hashlib.md5(), _part_bytes(size)
        if in_parts:
            # S3's ETag of a multipart upload is the MD5 of the MD5s of its parts.
            parts += [md5.digest()] if left < _part_bytes(size) else []
            return LocalFile(path, size, sha256.hexdigest(), f'{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}')
        return LocalFile(path, size, sha256.hexdigest(), md5.hexdigest())

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(path)

    def _request(self, name: str, call: Callable[[], T]) -> T:
        url = f'{self.url}/{name}'
        try:
            self._filesystem.invalidate_cache()
            return call()
        # Storage libraries pass on exceptions of their dependencies, which have no common base class.
        except Exception as error:
            known = classify_error(url, error)
            if isinstance(known, TransientStorageError):
                raise BucketError(str(known)) from error
            reason = ': '.join(filter(None, [type(error).__name__, short_message(url, error)]))
            raise PermissionDeniedError(f'{redact(url)}: refused ({reason})') from error


def _part_bytes(size: int) -> int:
    return max(PART_BYTES, math.ceil(size / MOST_PARTS / READ_BYTES) * READ_BYTES)


def _listed(info: dict[str, Any]) -> Listed:
    digest = str(info.get('ETag') or '').strip('"')
    if info.get('md5Hash'):
        digest = base64.b64decode(info['md5Hash']).hex()
    return Listed(int(info.get('size') or 0), digest)
