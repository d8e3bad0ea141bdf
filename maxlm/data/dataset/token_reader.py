"""Random access to the tokens of a data set's shards."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from maxlm.data.chat.token_flags import token_ids
from maxlm.data.dataset.manifest_files import reason_of, remedy
from maxlm.data.dataset.records import DatasetManifest, Shard
from maxlm.data.dataset.wait import wait_for_file
from maxlm.errors import InputError

# One record is read at a time: a seek and a read take a tenth of the time of a read by indices. A larger buffer would
# read unused data.
READER_OPTIONS = 'readahead_buffer_size:4096,max_parallelism:0'
# Maximum number of open shards per process, well below the usual limit of 1024 files.
OPEN_SHARDS = 256


class TokenReader:
    """Random access to the tokens of shards. Picklable and thread-safe. Each process opens its own files."""

    def __init__(
        self, dataset: DatasetManifest, shards: Sequence[Shard], *, fetched: bool = False, max_open: int = OPEN_SHARDS
    ):
        """Creates a reader.

        Args:
            dataset: the data set.
            shards: the shards to read.
            fetched: whether to wait for missing shards, which a `Fetcher` downloads.
            max_open: maximum number of open shards.
        """
        self.shards = tuple(shards)
        self._path = dataset.path
        self._block = dataset.block
        self._dtype = np.dtype(dataset.dtype).newbyteorder('<')
        self._vocab_size = dataset.vocab_size
        self._masked = dataset.masked
        self._fetched = fetched
        self._max_open = max_open
        self._forget_readers()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ('_readers', '_lock')}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_readers()

    def read(self, shard: int, start: int, stop: int) -> np.ndarray:
        """Returns the stored tokens [start, stop) of a shard's stream, at least two: [stop - start].

        Raises:
            InputError: the shard cannot be read or its content is damaged.
        """
        records = range(start // self._block, (stop - 2) // self._block + 1)
        try:
            blocks = [np.frombuffer(record, self._dtype) for record in self._read(shard, records)]
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._damaged(shard, reason_of(error)) from error
        # The last token of a record is also the first token of the next record.
        stream = blocks[0] if len(blocks) == 1 else np.concatenate([*(block[:-1] for block in blocks[:-1]), blocks[-1]])
        first = records.start * self._block
        tokens = stream[start - first : stop - first]
        if len(tokens) != stop - start:
            raise self._damaged(shard, f'tokens {start} to {stop} are incomplete')
        # An embedding of an id without a row would be that of another token, without an error.
        largest = int((token_ids(tokens) if self._masked else tokens).max())
        if largest >= self._vocab_size:
            raise self._damaged(shard, f'it contains id {largest}, but the vocabulary has {self._vocab_size} ids')
        return tokens

    def _damaged(self, shard: int, reason: str) -> InputError:
        return InputError(f'{self._path / self.shards[shard].name} is damaged: {reason}; {remedy(self._path)}')

    def _read(self, shard: int, records: Sequence[int]) -> list[bytes]:
        reader, lock = self._reader(shard)
        contents = []
        # Threads share the reader and its position.
        with lock:
            for record in records:
                reader.seek(record)
                contents.append(reader.read())
        return contents

    def _forget_readers(self) -> None:
        self._lock = threading.Lock()
        # Ordered by last use, the most recent last.
        self._readers: OrderedDict[int, tuple[ArrayRecordReader, threading.Lock]] = OrderedDict()

    def _reader(self, shard: int) -> tuple[ArrayRecordReader, threading.Lock]:
        with self._lock:
            if shard in self._readers:
                self._readers.move_to_end(shard)
                return self._readers[shard]
        # Opening may wait for a shard, so the lock is not held. Other threads can use open shards.
        entry = self.shards[shard]
        # The first token is not a target. The last entry may be shorter.
        num_records = math.ceil(max(0, entry.tokens - 1) / self._block)
        reader = self._open(self._path / entry.name)
        if (found := reader.num_records()) != num_records:
            raise self._damaged(shard, f'it has {found:,} records instead of {num_records:,}')
        with self._lock:
            opened = self._readers.setdefault(shard, (reader, threading.Lock()))
            while len(self._readers) > self._max_open:
                self._readers.popitem(last=False)
        return opened

    def _open(self, path: Path) -> ArrayRecordReader:
        while True:
            if self._fetched:
                wait_for_file(path)
            try:
                return ArrayRecordReader(os.fspath(path), READER_OPTIONS)
            except RuntimeError:
                # The file may have been evicted since the wait. The fetcher downloads it again.
                if not self._fetched or path.exists():
                    raise
