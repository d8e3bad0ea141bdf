"""Rows packed by best fit: an index of the documents of each row, and random access to the rows."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxlm.data.dataset.records import DatasetManifest, Shard
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.data.loader.best_fit import VERSION, pack_documents
from maxlm.data.loader.windows import Sequences
from maxlm.errors import InputError, explain_os_errors
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text

# Increment a version if the rows of a value of `data.rows` contain other tokens. A run does not resume with other rows.
VERSIONS = {'documents': 1, 'best_fit': 2}
# Number of tokens per read while documents are located.
CHUNK_TOKENS = 2**20
# Stored piece of a row: its first token in the shard, and its number of tokens.
PIECE = np.dtype([('start', '<i8'), ('length', '<i4')])
PIECES, FIRSTS, COUNTS = 'pieces.bin', 'firsts.bin', 'counts.json'


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """Counts of the rows of an epoch.

    Attributes:
        shard_rows: number of rows of each shard.
        tokens: number of tokens of the shards.
        lost_tokens: number of tokens that no row contains, because their document was cut.
        documents: number of documents.
        cut_documents: number of documents that do not fit into one row.
    """

    shard_rows: tuple[int, ...]
    tokens: int
    lost_tokens: int
    documents: int
    cut_documents: int


class RowIndex:
    """Pieces of the rows of all shards, in files that are mapped into memory. Picklable.

    Args:
        directory: directory of the index.

    Raises:
        OSError, TypeError, KeyError, ValueError: a file is missing or damaged.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        fields = parse_json(read_text(directory / COUNTS))
        self.counts = RowCounts(**{**fields, 'shard_rows': tuple(fields['shard_rows'])})
        self._map()
        # A crash of the machine can truncate files.
        if len(self._firsts) != sum(self.counts.shard_rows) + 1 or len(self._pieces) != self._firsts[-1]:
            raise ValueError('a file is incomplete; delete the directory')

    def __getstate__(self) -> tuple[Path, RowCounts]:
        return self._directory, self.counts

    def __setstate__(self, state: tuple[Path, RowCounts]) -> None:
        self._directory, self.counts = state
        self._map()

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Returns the first token within the shard, and the number of tokens, of each piece of a row."""
        return [(int(start), int(length)) for start, length in self._pieces[self._firsts[row] : self._firsts[row + 1]]]

    def _map(self) -> None:
        # NumPy cannot map an empty file.
        self._firsts = np.memmap(self._directory / FIRSTS, np.dtype('<i8'), 'r')
        has_pieces = len(self._firsts) > 1
        self._pieces = np.memmap(self._directory / PIECES, PIECE, 'r') if has_pieces else np.zeros(0, PIECE)


class DocumentSequences(Sequences):
    """Random access to rows of up to T + 1 tokens that consist of documents; see `pack_documents`. Picklable.

    A row has T inputs and their targets, as a window does. If the tokenizer writes no token before texts, or with
    `keeps_rests`, each row begins with an end-of-document token, which predicts the first token of its first document.
    If the row begins within a document, the token before it takes that place. A row is a pure function of its shard, so
    the rows of each epoch are the same, in another order.

    Args:
        dataset, split, window, shards: see `Sequences`.
        keeps_rests: see `pack_documents`.
        cache: directory of the indices.
        options: further arguments of `Sequences`.
    """

    def __init__(
        self,
        dataset: DatasetManifest,
        split: str,
        window: int,
        *,
        shards: Sequence[Shard],
        keeps_rests: bool,
        cache: Path,
        **options: Any,
    ):
        # The token that a tokenizer writes before a text is no target and needs no token before it. The first token of
        # a rest is a target.
        self._has_lead = keeps_rests or not dataset.beginning_of_document
        capacity = window + (not self._has_lead)
        self.index = open_row_index(dataset, shards, capacity, keeps_rests=keeps_rests, cache=cache)
        super().__init__(dataset, split, window, shards=shards, **options)

    @property
    def shard_windows(self) -> list[int]:
        """Returns the number of rows of each shard."""
        return list(self.index.counts.shard_rows)

    def stream(self, number: int) -> np.ndarray:
        """Returns the tokens of a row, [n + 1] with n ≤ T. Raises the same errors as `Sequences.stream`."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = self.shard_of(number)
        pieces = self.index.pieces(number)
        tokens = [read_tokens(self._reader, shard, start, length) for start, length in pieces]
        if self._has_lead:
            first = pieces[0][0]
            # The end of the document before it, or the token before a rest. The first document of a shard has neither.
            lead = read_tokens(self._reader, shard, first - 1, 1) if first else [self._end_of_document]
            tokens.insert(0, np.array(lead, tokens[0].dtype))
        return np.concatenate(tokens)


def open_row_index(
    dataset: DatasetManifest, shards: Sequence[Shard], capacity: int, *, keeps_rests: bool, cache: Path
) -> RowIndex:
    """Opens the index of the rows of `capacity` tokens, and writes it first if `cache` does not contain it.

    One shard at a time is in memory. Several processes may write the same index at the same time.

    Raises:
        InputError: a shard is damaged, or the index cannot be written.
    """
    contents = [VERSION, capacity, keeps_rests, dataset.end_of_document, [shard.sha256 for shard in shards]]
    directory = cache / 'rows' / hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]
    partial = directory.with_name(f'.{directory.name}.{uuid.uuid4().hex}.partial')
    with explain_os_errors(directory, 'set data.cache_dir to a writable directory with free space'):
        if not directory.exists():
            partial.mkdir(parents=True)
            try:
                _write_index(partial, dataset, shards, capacity, keeps_rests=keeps_rests)
                os.replace(partial, directory)
            except OSError:
                # Another process was faster.
                if not directory.exists():
                    raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    try:
        return RowIndex(directory)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f'{directory}: the index of the rows is damaged ({error}); delete it') from error


def read_tokens(reader: TokenReader, shard: int, start: int, length: int) -> np.ndarray:
    """Returns `length` ≥ 1 tokens of a shard of at least two tokens, [length]. A reader returns at least two."""
    if length > 1:
        return reader.read(shard, start, start + length)
    return reader.read(shard, start - 1, start + 1)[1:] if start else reader.read(shard, 0, 2)[:1]


def _write_index(
    directory: Path, dataset: DatasetManifest, shards: Sequence[Shard], capacity: int, *, keeps_rests: bool
) -> None:
    reader = TokenReader(dataset, shards, max_open=1)
    shard_rows, num_pieces, documents, lost, cut = [], 0, 0, 0, 0
    with (directory / PIECES).open('wb') as pieces_file, (directory / FIRSTS).open('wb') as firsts_file:
        for shard, entry in enumerate(shards):
            lengths = np.zeros(0, np.int64) if entry.tokens < 2 else _document_lengths(reader, shard, dataset)
            packed = pack_documents(lengths, capacity, keeps_rests=keeps_rests)
            pieces = np.zeros(len(packed.documents), PIECE)
            pieces['start'] = (np.cumsum(lengths) - lengths)[packed.documents] + packed.starts
            pieces['length'] = packed.lengths
            _append(pieces_file, pieces)
            _append(firsts_file, (packed.firsts[:-1] + num_pieces).astype('<i8'))
            is_cut = (packed.starts == 0) & (packed.lengths < lengths[packed.documents])
            shard_rows.append(len(packed.firsts) - 1)
            num_pieces += len(pieces)
            documents += len(lengths)
            lost += int(lengths.sum() - packed.lengths.sum())
            cut += int(np.count_nonzero(is_cut))
        _append(firsts_file, np.array([num_pieces], '<i8'))
    counts = RowCounts(tuple(shard_rows), sum(shard.tokens for shard in shards), lost, documents, cut)
    (directory / COUNTS).write_text(json.dumps(dataclasses.asdict(counts)))


def _append(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.tobytes())


def _document_lengths(reader: TokenReader, shard: int, dataset: DatasetManifest) -> np.ndarray:
    """Returns the number of tokens of each document of a shard, including the end-of-document token."""
    tokens = reader.shards[shard].tokens
    ends = [
        start + 1 + np.flatnonzero(read_tokens(reader, shard, start, stop - start) == dataset.end_of_document)
        for start, stop in _chunks(tokens)
    ]
    stops = np.concatenate(ends)
    # A stream whose last document has no end.
    if not len(stops) or stops[-1] != tokens:
        stops = np.append(stops, tokens)
    return np.diff(stops, prepend=0)


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([*range(0, tokens, CHUNK_TOKENS), tokens])
