"""Partitions of the input. Each contains file ranges of one source and is read, filtered and written independently.

Partitions depend only on the names and sizes of the files, so they are the same on every machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import socket
import sys
from collections.abc import Iterator, Sequence

from maxlm.data.documents.document import Document, raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.executor import TransientError
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file
from maxlm.data.formats.input_file import InputFile
from maxlm.data.prepare.task_results import identity_of
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.filesystem import display_path, is_url

# Number of partitions within the size limits below. Several partitions per worker keep all workers busy to the end.
# MAX_GROUP_BYTES limits the work that a failure repeats. MIN_GROUP_BYTES limits the number of shards of small inputs.
GROUPS = 64
MAX_GROUP_BYTES = 256 * 2**20
MIN_GROUP_BYTES = 2 * 2**20
# Kinds of inputs that are named data sets and not files.
NAMED_KINDS = frozenset({'hub', 'tfds'})
# Number of files that are split concurrently: each lookup in a bucket is slow.
LOOKUP_THREADS = 16
# Characters per batch of documents: enough to keep the encoder busy, few enough to update the progress bar often.
BATCH_CHARACTERS = 2**20


@dataclasses.dataclass(frozen=True)
class Partition:
    """File ranges of one source, in order. Picklable.

    Attributes:
        number: index of the partition.
        file_ranges: the ranges to read; at least one.
        is_validation: True if all documents are validation data.
    """

    number: int
    file_ranges: tuple[FileRange, ...]
    is_validation: bool

    @property
    def source(self) -> str:
        """Name of the source of all documents."""
        return self.file_ranges[0].file.source

    @property
    def size(self) -> int:
        """Size of the input in bytes."""
        return sum(file_range.size for file_range in self.file_ranges)

    @property
    def name(self) -> str:
        """Name for messages: the first file, the start in it, and the number of further files."""
        first = self.file_ranges[0]
        more = len({file_range.file.path for file_range in self.file_ranges}) - 1
        part = f' from {first.start:,}' if first.start else ''
        return display_path(first.file.path) + part + (f' and {more:,} more files' if more else '')

    @functools.cached_property
    def identity(self) -> str:
        """Checksum of the file ranges and the versions of their files."""
        files = [(file_range.file, file_range.start, file_range.stop) for file_range in self.file_ranges]
        fields = [(f.name, f.source, f.kind, f.size, f.version, start, stop) for f, start, stop in files]
        return identity_of(self.number, self.is_validation, fields)


class PartitionTask:
    """Base class of tasks that process one partition. See `Task`."""

    partition: Partition

    @property
    def name(self) -> str:
        """See `Task`."""
        return self.partition.name

    @property
    def size(self) -> int:
        """See `Task`."""
        return self.partition.size

    def check_machine(self) -> None:
        """See `PartTask`. Compares the sizes of local input files."""
        for file in {file_range.file for file_range in self.partition.file_ranges}:
            if file.kind in NAMED_KINDS or is_url(file.path):
                continue
            if (size := filesystem.stat(file.path).size) != file.size:
                raise InputError(
                    f'{file.path} on {socket.gethostname()} has {size:,} bytes instead of {file.size:,} as on the '
                    'machine that started maxlm prepare; use inputs that all machines share, such as URLs'
                )


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """Settings for reading documents.

    Attributes:
        options: options of the readers.
        skip_bad: whether unreadable records are skipped.
    """

    options: ReadOptions
    skip_bad: bool

    @property
    def identity(self) -> str:
        """Checksum of the settings."""
        return identity_of(dataclasses.asdict(self))


def make_partitions(training: Sequence[InputFile], validation: Sequence[InputFile]) -> list[Partition]:
    """Splits the files into ranges and packs the ranges, in order, into partitions. Validation files come last."""
    total = sum(file.size for file in (*training, *validation))
    target = min(MAX_GROUP_BYTES, max(MIN_GROUP_BYTES, total // GROUPS))
    partitions = [(False, file_ranges) for file_ranges in _pack(training, target)]
    partitions += [(True, file_ranges) for file_ranges in _pack(validation, target)]
    return [
        Partition(number, file_ranges, is_validation) for number, (is_validation, file_ranges) in enumerate(partitions)
    ]


def read_batches(
    partition: Partition, reading: ReadSettings, skipped: list[dict[str, str]]
) -> Iterator[tuple[list[Document], int]]:
    """Yields the documents of a partition in order, in batches of about BATCH_CHARACTERS.

    Each batch comes with the number of input bytes processed since the previous batch.

    Args:
        partition: the partition to read.
        reading: settings of the readers.
        skipped: list to which the name and reason of each skipped record are appended.

    Raises:
        InputError: a record cannot be read, and `reading.skip_bad` is False.
        TransientError: the storage fails. Such records are never skipped.
    """

    def on_bad(name: str, reason: str) -> None:
        # Readers call this while they handle the original exception.
        if isinstance(sys.exception(), TransientStorageError):
            raise TransientError(reason)
        if not reading.skip_bad:
            raise_bad(name, reason)
        skipped.append({'name': name, 'reason': reason})

    batch: list[Document] = []
    characters = done = 0
    for file_range in partition.file_ranges:
        num_bytes_left = file_range.size
        for document in read_documents(file_range, reading.options, on_bad):
            batch.append(document)
            # Token files have two or four bytes per token; progress counts two.
            size = len(document.text) if document.tokens is None else 2 * len(document.tokens)
            spent = min(num_bytes_left, size)
            num_bytes_left, done, characters = num_bytes_left - spent, done + spent, characters + size
            if characters >= BATCH_CHARACTERS:
                yield batch, done
                batch, characters, done = [], 0, 0
        done += num_bytes_left
    if batch or done:
        yield batch, done


def _pack(files: Sequence[InputFile], target: int) -> list[tuple[FileRange, ...]]:
    with concurrent.futures.ThreadPoolExecutor(LOOKUP_THREADS) as pool:
        file_ranges = [
            file_range for found in pool.map(lambda file: _split(file, target), files) for file_range in found
        ]
    partitions: list[list[FileRange]] = []
    size = target
    for file_range in file_ranges:
        if size >= target or partitions[-1][0].file.source != file_range.file.source:
            partitions.append([])
            size = 0
        partitions[-1].append(file_range)
        size += file_range.size
    return [tuple(partition) for partition in partitions]


def _split(file: InputFile, target: int) -> list[FileRange]:
    # `split_file` returns the same for a small file, but opens it.
    return [FileRange(file, 0, 0, file.size)] if file.size <= target else split_file(file, target)
