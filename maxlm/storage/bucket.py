"""The directory of a run in a bucket: listed, written, deleted; what goes wrong is one line without secrets."""

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
from maxlm.storage.object_store import open_filesystem, read_range

# A request carries so much of a large file: what arrives shows as progress, and little is sent twice.
PART_BYTES = 2**24
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html: no more than 10,000 parts.
MOST_PARTS = 9_000
READ_BYTES = 2**20

T = TypeVar('T')


class BucketError(TransientStorageError):
    """The bucket did not do what it was asked: an outage, or a permission that may be given yet."""


class PermissionDeniedError(BucketError):
    """The bucket says no, which waiting alone does not change: credentials, permissions, a bucket that is not there."""


class Listed(NamedTuple):
    """Size in bytes of an object, and what the bucket tells of its content: MD5, or S3's ETag; '' = nothing."""

    size: int
    digest: str


class LocalFile(NamedTuple):
    """A file that is to be in the bucket.

    Attributes:
        path: where it is.
        size: bytes.
        sha256: of its content, hexadecimal.
        digest: what the bucket will tell of it.
    """

    path: Path
    size: int
    sha256: str
    digest: str


class Bucket:
    """Objects by their names below a URL."""

    def __init__(self, url: str):
        """
        Raises:
            InputError: the protocol is unknown, or a package is missing.
        """
        self.url = url.rstrip('/')
        self._filesystem, root = open_filesystem(self.url)
        self._root = root.rstrip('/')
        # S3's ETags of encrypted objects are no MD5; there the client's own checksum guards what is sent.
        self.tells_md5 = self.url.startswith(('gs://', 'gcs://'))

    def list(self, prefix: str = '') -> dict[str, Listed]:
        """All objects below `prefix/`, or below the URL.

        Raises:
            BucketError: it cannot be listed.
        """
        below = f'{self._root}/{prefix}'.rstrip('/')
        found: dict[str, dict[str, Any]] = self._ask(
            prefix, lambda: self._filesystem.find(below, detail=True, withdirs=False)
        )
        return {name.removeprefix(f'{self._root}/'): _listed(facts) for name, facts in found.items()}

    def list_one(self, name: str) -> Listed | None:
        """One object, or None where there is none. Raises BucketError when the bucket does not tell."""

        def ask() -> Listed | None:
            try:
                return _listed(self._filesystem.info(f'{self._root}/{name}'))
            except FileNotFoundError:
                return None

        return self._ask(name, ask)

    def read(self, name: str) -> bytes:
        """The content of an object. Raises BucketError when it cannot be had."""
        return self._ask(name, functools.partial(read_range, self._filesystem, f'{self._root}/{name}', None, None))

    def sha256(self, name: str, size: int) -> str:
        """Reads an object in parts and returns its checksum. Raises BucketError when it cannot be had."""
        digest = hashlib.sha256()
        for start in range(0, size, PART_BYTES):
            read = functools.partial(
                read_range, self._filesystem, f'{self._root}/{name}', start, min(start + PART_BYTES, size)
            )
            digest.update(self._ask(name, read))
        return digest.hexdigest()

    def put(self, name: str, content: bytes) -> None:
        """Writes a small object. Raises BucketError when it cannot be written."""
        self._ask(name, lambda: self._filesystem.pipe_file(f'{self._root}/{name}', content))

    def put_file(self, name: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Writes a file, which shows under its name when it is whole.

        Raises:
            BucketError: it cannot be written.
            FileNotFoundError: the local file is gone.
        """
        import fsspec.callbacks  # takes a while

        class Told(fsspec.callbacks.Callback):
            def call(self, *_: Any, **__: Any) -> None:
                # It is also told of the size, before anything is sent.
                if self.value:
                    on_bytes(self.value)

        size = path.stat().st_size
        self._ask(
            name,
            lambda: self._filesystem.put_file(
                str(path), f'{self._root}/{name}', chunksize=_part_bytes(size), callback=Told()
            ),
        )

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects one after the other, those that are not there too. Raises BucketError."""
        for name in names:
            self._ask(name, functools.partial(self._remove, f'{self._root}/{name}'))

    def describe(self, path: Path) -> LocalFile:
        """Reads a local file, once.

        Raises:
            OSError: it cannot be read.
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
            # As S3 does: the MD5 of the MD5s of its parts.
            parts += [md5.digest()] if left < _part_bytes(size) else []
            return LocalFile(path, size, sha256.hexdigest(), f'{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}')
        return LocalFile(path, size, sha256.hexdigest(), md5.hexdigest())

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(path)

    def _ask(self, name: str, ask: Callable[[], T]) -> T:
        url = f'{self.url}/{name}'
        try:
            self._filesystem.invalidate_cache()
            return ask()
        # Libraries raise what their own libraries raise: there is no common ancestor.
        except Exception as error:
            known = classify_error(url, error)
            if isinstance(known, TransientStorageError):
                raise BucketError(str(known)) from error
            reason = short_message(url, error) or type(error).__name__
            raise PermissionDeniedError(f'{redact(url)}: refused ({reason})') from error


def _part_bytes(size: int) -> int:
    return max(PART_BYTES, math.ceil(size / MOST_PARTS / READ_BYTES) * READ_BYTES)


def _listed(facts: dict[str, Any]) -> Listed:
    digest = str(facts.get('ETag') or '').strip('"')
    if facts.get('md5Hash'):
        digest = base64.b64decode(facts['md5Hash']).hex()
    return Listed(int(facts.get('size') or 0), digest)
