"""Parts of input files that are read independently of each other, so that workers share even a single file."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Iterator

from maxlm.data.documents.document import Document, OnBad, raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.registry import READERS
from maxlm.storage.errors import StorageError, TransientStorageError


def read_documents(file_range: FileRange, options: ReadOptions, on_bad: OnBad = raise_bad) -> Iterator[Document]:
    """The documents of one piece, in order and one at a time; those without a character or token are left out.

    Names are the file's, and where a file holds several documents also what finds one in it without the others: the
    byte at which a line of JSONL begins, the row of Parquet, the first token of token files, the row or example of a
    data set, all from 0.

    `on_bad(name, reason)` is called for what cannot be read, a file or a record of it. The reason names the file and
    record (lines of JSONL from 1, as editors count them) and what would be right; the name is the file's or
    `FILE:RECORD`. What is readable behind a bad record is read nevertheless.
    """
    documents = READERS[file_range.file.kind].read(
        file_range.file, file_range.start, file_range.stop or sys.maxsize, options, on_bad
    )
    for document in documents:
        if document.text or (document.tokens is not None and len(document.tokens)):
            yield document


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A part of one input file. Picklable.

    Attributes:
        file: the file.
        start, stop: from unit `start` to before unit `stop`, in the units of its format; [0, 0) is the whole file.
        size: bytes, for progress and for groups of pieces.
    """

    file: InputFile
    start: int
    stop: int
    size: int


def split_file(file: InputFile, target_bytes: int) -> list[FileRange]:
    """Cuts a file into pieces of about `target_bytes`. Each document is in exactly one of them.

    The pieces depend only on the file. A file that cannot be cut, or that is damaged, is one piece: reading it reports
    the damage.

    Raises:
        TransientStorageError: the storage does not answer. One piece for the whole file would change the shards.
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
    # At the unit nearest behind each equal share; large units swallow some of them.
    boundaries = {bisect.bisect_left(bounds, bounds[-1] * i // count) for i in range(count)} | {len(bounds) - 1}
    return [
        FileRange(file, start, stop, bounds[stop] - bounds[start])
        for start, stop in itertools.pairwise(sorted(boundaries))
    ]
