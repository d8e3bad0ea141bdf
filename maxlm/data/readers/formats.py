"""The table of formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxlm.data.documents import Document, OnBad
from maxlm.data.inputs import InputFile
from maxlm.data.readers import hub, jsonl, parquet, text, tfds, tokens
from maxlm.data.readers.options import ReadOptions


class Reader(NamedTuple):
    """How a format is read.

    Attributes:
        bounds: (file) → the bytes at which its units begin and, last, end; ascending from 0. Units are what the file
            can be cut between. Empty where it cannot be cut, or is damaged. Raises StorageError when it cannot be read.
        read: (file, start, stop, options, on_bad) → the documents that begin in units [start, stop), in order. `stop`
            may be far beyond the end.
    """

    bounds: Callable[[InputFile], Sequence[int]]
    read: Callable[[InputFile, int, int, ReadOptions, OnBad], Iterator[Document]]


READERS = {
    'text': Reader(text.bounds, text.read),
    'jsonl': Reader(jsonl.bounds, jsonl.read),
    'parquet': Reader(parquet.bounds, parquet.read),
    'tokens': Reader(tokens.bounds, tokens.read),
    'tfds': Reader(tfds.bounds, tfds.read),
    'hub': Reader(hub.bounds, hub.read),
}
