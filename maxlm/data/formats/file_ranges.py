"""Ranges of input files that can be read independently, so that several workers can read one file."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Iterator

from maxlm.data.documents.document import Document, OnBad, raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.record_formats import READERS
from maxlm.storage.errors import StorageError, TransientStorageError


def read_documents(file_range: FileRange, options: ReadOptions, on_bad: OnBad = raise_bad) -> Iterator[Document]:
    """Yields the documents of a range one at a time and in order, without empty documents.

    Document names start with the name of the file. If a file contains several documents, the name also contains the
    position of the document, counted from 0: the byte at which a JSONL line starts, the Parquet row, the first token in
    a token file, or the row or example of a dataset.

    `on_bad(name, reason)` is called for each unreadable file or record. The reason names the file, the record (JSONL
    lines are counted from 1, as in editors) and the expected content. The name is that of the file or `FILE:RECORD`.
    Readable records after a bad record are still returned.
    """
    documents = READERS[file_range.file.kind].read(
        file_range.file, file_range.start, file_range.stop or sys.maxsize, options, on_bad
    )
    for document in documents:
        if document.text or (document.tokens is not None and len(document.tokens)):
            yield document


@dataclasses.dataclass(frozen=True)
class FileRange:
    """Range of one input file. Picklable.

    Attributes:
        file: the file.
        start, stop: the range [start, stop) in units of the format; [0, 0) is the entire file.
        size: number of bytes, for progress reports and for grouping ranges.
    """

    file: InputFile
    start: int
    stop: int
    size: int


def split_file(file: InputFile, target_bytes: int) -> list[FileRange]:
    """Splits a file into ranges of about `target_bytes`. Each document is in exactly one range.

    The ranges depend only on the file. A file that is damaged or cannot be split is one range; reading it reports the
    damage.

    Raises:
        TransientStorageError: the storage does not respond. Falling back to one range would change the shards.
    """
    assert target_bytes > 0
    try:
        bounds = READERS[file.kind].bounds(file)
    except TransientStorageError:
        raise
    except StorageError:
        bounds = ()
    if len(bounds) < 2 or bounds[-1] <= target_bytes:
        return [FileRange(file, 0, 0, file.size)]
    count = -(-bounds[-1] // target_bytes)
    # Split at the first unit at or after each equal share. A large unit can contain several of these points.
    boundaries = {bisect.bisect_left(bounds, bounds[-1] * i // count) for i in range(count)} | {len(bounds) - 1}
    return [
        FileRange(file, start, stop, bounds[stop] - bounds[start])
        for start, stop in itertools.pairwise(sorted(boundaries))
    ]
