"""Groups: pieces of one source that are read, cleaned and written together, independently of all others.

Everything about them follows from names and sizes, so that they are the same on every machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence

from maxlm.data.documents.document import Document, raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.executors.executor import TransientError
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file
from maxlm.data.formats.input_file import InputFile
from maxlm.data.prepare.task_results import identity_of
from maxlm.storage.errors import TransientStorageError
from maxlm.storage.filesystem import display_path

# A group is about this share of the input, so that all workers are busy to the end; but of terabytes no more than
# MAX_GROUP_BYTES, what a failure costs, and of little data no less than MIN_GROUP_BYTES, to keep shards few.
GROUPS = 64
MAX_GROUP_BYTES = 256 * 2**20
MIN_GROUP_BYTES = 2 * 2**20
# Files whose units are looked up at once: in a bucket each takes a while.
LOOKUP_THREADS = 16
# Characters that are worked on together: enough to keep an encoder busy, little enough for a moving progress bar.
BATCH_CHARACTERS = 2**20


@dataclasses.dataclass(frozen=True)
class Partition:
    """File ranges of one source, in order. Picklable.

    Attributes:
        number: index among all partitions.
        file_ranges: ranges to read; at least one.
        is_validation: all of it is validation data.
    """

    number: int
    file_ranges: tuple[FileRange, ...]
    is_validation: bool

    @property
    def source(self) -> str:
        """What all of its documents are from."""
        return self.file_ranges[0].file.source

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(file_range.size for file_range in self.file_ranges)

    @property
    def name(self) -> str:
        """For messages: where it begins, and how much it is."""
        first = self.file_ranges[0]
        more = len({file_range.file.path for file_range in self.file_ranges}) - 1
        part = f' from {first.start:,}' if first.start else ''
        return display_path(first.file.path) + part + (f' and {more:,} more files' if more else '')

    @functools.cached_property
    def identity(self) -> str:
        """Checksum of what is read."""
        files = [(file_range.file, file_range.start, file_range.stop) for file_range in self.file_ranges]
        facts = [(f.name, f.source, f.kind, f.size, f.version, start, stop) for f, start, stop in files]
        return identity_of(self.number, self.is_validation, facts)


class PartitionTask:
    """Base of the tasks that work on one partition. See `executor.Task`."""

    group: Partition

    @property
    def name(self) -> str:
        """See `executor.Task`."""
        return self.group.name

    @property
    def size(self) -> int:
        """See `executor.Task`."""
        return self.group.size


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """How documents are read: the options of the readers, and whether what cannot be read is left out."""

    options: ReadOptions
    skip_bad: bool

    @property
    def identity(self) -> str:
        """Checksum of all of it."""
        return identity_of(dataclasses.asdict(self))


def make_partitions(training: Sequence[InputFile], validation: Sequence[InputFile]) -> list[Partition]:
    """Cuts the files into pieces and packs these, in order, into groups; those to validate on come last."""
    total = sum(file.size for file in (*training, *validation))
    target = min(MAX_GROUP_BYTES, max(MIN_GROUP_BYTES, total // GROUPS))
    partitions = [(False, file_ranges) for file_ranges in _pack(training, target)]
    partitions += [(True, file_ranges) for file_ranges in _pack(validation, target)]
    return [
        Partition(number, file_ranges, is_validation) for number, (is_validation, file_ranges) in enumerate(partitions)
    ]


def read_batches(
    group: Partition, reading: ReadSettings, left_out: list[dict[str, str]]
) -> Iterator[tuple[list[Document], int]]:
    """The documents of a group in order, a few at a time, each time with the bytes of input that are done.

    What cannot be read and may be left out is added to `left_out`, as name and reason.

    Raises:
        InputError: a document cannot be read, and nothing may be left out.
        TransientError: the storage fails; neither is that left out.
    """

    def on_bad(name: str, reason: str) -> None:
        # Readers report a fault while they handle it, so that what is behind it can still be told.
        if isinstance(sys.exception(), TransientStorageError):
            raise TransientError(reason)
        if not reading.skip_bad:
            raise_bad(name, reason)
        left_out.append({'name': name, 'reason': reason})

    batch: list[Document] = []
    characters = done = 0
    for file_range in group.file_ranges:
        num_bytes_left = file_range.size
        for document in read_documents(file_range, reading.options, on_bad):
            batch.append(document)
            # Token files have two or four bytes per token.
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
    groups: list[list[FileRange]] = []
    size = target
    for file_range in file_ranges:
        if size >= target or groups[-1][0].file.source != file_range.file.source:
            groups.append([])
            size = 0
        groups[-1].append(file_range)
        size += file_range.size
    return [tuple(group) for group in groups]


def _split(file: InputFile, target: int) -> list[FileRange]:
    # The same as `cut` gives for such a file, which it would open.
    return [FileRange(file, 0, 0, file.size)] if file.size <= target else split_file(file, target)
