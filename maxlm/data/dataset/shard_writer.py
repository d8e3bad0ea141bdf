"""Writes shards of tokens as ArrayRecord files."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from maxlm.data.dataset.manifest_files import reason_of
from maxlm.data.dataset.records import Shard
from maxlm.errors import InputError

# Records are read one at a time in random order, so grouping does not help. Fast compression hardly shrinks token ids.
WRITER_OPTIONS = 'group_size:1,uncompressed'


class ShardWriter:
    """Writes one shard. The file is renamed to its final name when it is complete and synced.

    Use it as a context manager. An exception deletes the partial file.
    """

    def __init__(self, path: Path, *, source: str, block: int, dtype: str):
        self._path = path
        self._source = source
        # A unique name, because a lost worker on a disconnected node may still write the same shard.
        self._partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.partial')
        self._block = block
        self._dtype = np.dtype(dtype).newbyteorder('<')
        self._pending = np.empty(0, self._dtype)
        self._tokens = 0
        self._documents = 0
        self._writer = ArrayRecordWriter(os.fspath(self._partial), WRITER_OPTIONS)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._partial.unlink(missing_ok=True)

    def write(self, documents: Sequence[np.ndarray]) -> None:
        """Appends documents: arrays [number of tokens] that end with the end-of-document token."""
        self._documents += len(documents)
        self._tokens += sum(map(len, documents))
        pending = np.concatenate([self._pending, *documents]).astype(self._dtype)
        start = 0
        # A record needs one token after the block, which is the last target.
        while len(pending) - start > self._block:
            self._write_record(pending[start : start + self._block + 1])
            start += self._block
        self._pending = pending[start:]

    def finish(self) -> Shard:
        """Writes the last record, renames the file and returns its description."""
        # A single remaining token is already the last target of the previous record.
        if len(self._pending) > 1:
            self._write_record(self._pending)
        try:
            self._writer.close()
            checksum, size = _sync_and_hash(self._partial)
            os.replace(self._partial, self._path)
        except (RuntimeError, OSError) as error:
            raise InputError(
                f'{self._path}: cannot be written: {reason_of(error)}; check permissions and disk space'
            ) from error
        return Shard(self._path.name, self._source, self._tokens, self._documents, size, checksum)

    def _write_record(self, tokens: np.ndarray) -> None:
        try:
            self._writer.write(tokens.tobytes())
        except RuntimeError as error:
            raise InputError(
                f'{self._path}: cannot be written: {reason_of(error)}; check permissions and disk space'
            ) from error


def _sync_and_hash(path: Path) -> tuple[str, int]:
    with path.open('rb') as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, 'sha256').hexdigest(), file.tell()
