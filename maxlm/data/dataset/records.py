"""The record format: shards of token blocks in ArrayRecord, and the manifest `dataset.json` that makes them a data set.

A split (`train`, `validation`) is a list of shards. A shard is one stream of tokens: whole documents, each followed by
the end of document. Record i of a shard holds stream[i · block : (i + 1) · block + 1] as little-endian integers; it
shares its last token with its successor, so that a window inside one block has its targets too. The last is shorter.
Those of a masked data set, one of conversations, are marked: see `marks`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import typing
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from maxlm.data.chat.packing import ChatCounts, PairCounts
from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

FORMAT_VERSION = 2
MANIFEST_NAME = 'dataset.json'
# What the manifest of a masked data set tells beyond that of others.
UNMASKED: dict[str, Any] = {'masked': False, 'packed_window': 0, 'chat_template_sha256': '', 'chat': {}}
# What that of one with preferences tells besides.
NO_PREFERENCES: dict[str, Any] = {'preferences': False}
# Records are read one at a time in random order: no grouping, and nothing to gain from compressing token ids cheaply.
WRITER_OPTIONS = 'group_size:1,uncompressed'
# Smallest and largest values of the manifest's integers. Ids leave two bits of 32 for marks: see `marks`.
BOUNDS = {'vocab_size': (1, 2**30), 'block': (1, 2**31 - 1), 'packed_window': (0, 2**31 - 1)}
BOUNDS_OF_COUNTS = (0, 2**62)

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of records, all from the same source. `bytes` is the size of the file, `sha256` its checksum."""

    name: str
    source: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class SourceCounts:
    """What one input gave to a split. `share` is of the split's tokens."""

    documents: int
    tokens: int
    text_bytes: int
    share: float


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a data set.

    Attributes:
        documents, tokens: counts; tokens include one end of document each.
        text_bytes: bytes of UTF-8.
        unigram_entropy: nats per token of the split's own token frequencies; what a model without context reaches.
        sources: counts by name of the input.
        shards: the files.
    """

    documents: int
    tokens: int
    text_bytes: int
    unigram_entropy: float
    sources: dict[str, SourceCounts]
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set as its manifest describes it.

    Attributes:
        path: its directory.
        tokenizer: `bytes`, `chars`, `bpe`, `ids` or `file`: how the tokenizer was made.
        tokenizer_file, tokenizer_sha256: its `tokenizer.json`.
        vocab_size: token ids are 0 … vocab_size - 1.
        end_of_document: id after each document.
        dtype: `uint16` or `uint32`, as stored.
        block: tokens in a record, less the shared one.
        splits: `train` and `validation`.
        left_out: names and reasons of the documents that could not be read.
        made_from: the arguments and a checksum of the inputs that it was made from.
        fingerprint: checksum of all tokens and of the format.
        masked: whether tokens are marked, so that only some are predicted; then `dtype` is `uint32`.
        packed_window: tokens of the windows that whole conversations were packed into; 0 = not packed.
        chat_template_sha256: checksum of CHAT_TEMPLATE_FILE, '' = there is none.
        chat: of each split, counts by name: see `chat_packing.ChatCounts` and `PairCounts`.
        preferences: whether each two documents of a window are the answers to one prompt, the one that was chosen
            first. The end of a window may be a further document, of padding.
    """

    path: Path
    tokenizer: str
    tokenizer_file: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: int
    dtype: str
    block: int
    splits: dict[str, Split]
    left_out: tuple[dict[str, str], ...]
    made_from: dict[str, Any]
    fingerprint: str
    masked: bool = False
    packed_window: int = 0
    chat_template_sha256: str = ''
    chat: dict[str, Any] = dataclasses.field(default_factory=dict)
    preferences: bool = False

    @property
    def tokenizer_path(self) -> Path:
        return self.path / self.tokenizer_file

    @property
    def beside(self) -> dict[str, str]:
        """The files beside the shards, with their checksums: tokenizer and, if there is one, chat template."""
        template = {CHAT_TEMPLATE_FILE: self.chat_template_sha256} if self.chat_template_sha256 else {}
        return {self.tokenizer_file: self.tokenizer_sha256, **template}


def token_dtype(vocab_size: int) -> str:
    """The stored type of token ids below `vocab_size`."""
    return 'uint16' if vocab_size <= 2**16 else 'uint32'


class ShardWriter:
    """Writes one shard; the file appears under its name only when it is complete and on the disk.

    Use as a context manager; leaving it with an exception removes what was written.
    """

    def __init__(self, path: Path, *, source: str, block: int, dtype: str):
        self._path = path
        self._source = source
        # A name of its own: a worker that was given up may still write the same shard on a node that is cut off.
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
        """Appends documents: arrays [number of tokens] that end with the end of document."""
        self._documents += len(documents)
        self._tokens += sum(map(len, documents))
        pending = np.concatenate([self._pending, *documents]).astype(self._dtype)
        start = 0
        # One token more than a block must be there: it is the last target.
        while len(pending) - start > self._block:
            self._write_record(pending[start : start + self._block + 1])
            start += self._block
        self._pending = pending[start:]

    def finish(self) -> Shard:
        """Writes the last record, moves the file to its name and describes it."""
        # A single token left over is the last target of the record before: it needs no record of its own.
        if len(self._pending) > 1:
            self._write_record(self._pending)
        try:
            self._writer.close()
            checksum, size = _sync_and_hash(self._partial)
            os.replace(self._partial, self._path)
        except (RuntimeError, OSError) as error:
            raise InputError(f'{self._path}: cannot be written: {reason_of(error)}') from error
        return Shard(self._path.name, self._source, self._tokens, self._documents, size, checksum)

    def _write_record(self, tokens: np.ndarray) -> None:
        try:
            self._writer.write(tokens.tobytes())
        except RuntimeError as error:
            raise InputError(f'{self._path}: cannot be written: {reason_of(error)}') from error


def save_manifest(dataset: Dataset) -> None:
    """Writes `dataset.json`, whole or not at all: from then on the directory is a data set."""
    facts = {'format_version': FORMAT_VERSION, **dataclasses.asdict(dataset)}
    del facts['path']
    for name in (*(() if dataset.masked else UNMASKED), *(() if dataset.preferences else NO_PREFERENCES)):
        del facts[name]
    atomic_write(dataset.path / MANIFEST_NAME, (json.dumps(facts, indent=1) + '\n').encode())


def load_manifest(path: str | os.PathLike[str], *, complete: bool = True) -> Dataset:
    """Reads the data set in directory `path` and, with `complete`, checks that its files are there in full length.

    Raises:
        InputError: there is no data set, the manifest is malformed, or a file is missing or cut short.
    """
    path = Path(path)
    manifest = path / MANIFEST_NAME
    try:
        facts = parse_json(read_bytes(manifest, limit=MAX_TEXT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f'{path} holds no data set ({MANIFEST_NAME} is missing); make one with '
            f'`python -m maxlm.prepare --input … --output {path}`'
        ) from None
    except OSError as error:
        raise InputError(f'{manifest}: {os_message(error)}') from error
    except ValueError as error:
        raise InputError(f'{manifest} is not JSON ({error}); {remedy(path)}') from error
    try:
        dataset = _parse_manifest(path, facts)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{manifest} is malformed ({str(error)[:300]}); {remedy(path)}') from error
    expected = {shard.name: shard.bytes for split in dataset.splits.values() for shard in split.shards}
    for name, size in expected.items() if complete else ():
        actual = _size(path, name)
        if actual != size:
            raise InputError(f'{path / name} is truncated: {actual} bytes instead of {size}; {remedy(path)}')
    for name in dataset.beside:
        _size(path, name)
    return dataset


def verify(dataset: Dataset) -> None:
    """Reads all files of the data set; raises InputError naming the first that differs from what was written."""
    expected = {shard.name: shard.sha256 for split in dataset.splits.values() for shard in split.shards}
    for name, checksum in {**expected, **dataset.beside}.items():
        try:
            with (dataset.path / name).open('rb') as file:
                actual = hashlib.file_digest(file, 'sha256').hexdigest()
        except OSError as error:
            raise InputError(f'{dataset.path / name}: {os_message(error)}; {remedy(dataset.path)}') from error
        if actual != checksum:
            raise InputError(f'{dataset.path / name} is damaged: its checksum differs; {remedy(dataset.path)}')


def dataset_fingerprint(
    *,
    block: int,
    dtype: str,
    end_of_document: int,
    splits: dict[str, Split],
    masked: bool = False,
    preferences: bool = False,
) -> str:
    """SHA-256 over the checksums and sources of all shards and what their bytes mean."""
    shards = {name: [(shard.source, shard.sha256) for shard in split.shards] for name, split in splits.items()}
    kinds = [*(['masked'] if masked else []), *(['preferences'] if preferences else [])]
    facts = [FORMAT_VERSION, block, dtype, end_of_document, shards, *kinds]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _parse_manifest(path: Path, facts: Any) -> Dataset:
    if not isinstance(facts, dict):
        raise TypeError('not an object')
    if (version := facts.pop('format_version')) != FORMAT_VERSION:
        raise InputError(
            f'{path / MANIFEST_NAME} has format {str(version)[:50]}, this maxlm reads {FORMAT_VERSION}; '
            'prepare the text again, with another --output'
        )
    splits = {
        name: _build(
            Split,
            {
                **split,
                'sources': {source: _build(SourceCounts, counts) for source, counts in split['sources'].items()},
                'shards': tuple(_build(Shard, shard) for shard in split['shards']),
            },
        )
        for name, split in facts['splits'].items()
    }
    facts = {**({} if 'masked' in facts else UNMASKED), **NO_PREFERENCES, **facts}
    dataset = _build(Dataset, {**facts, 'path': path, 'splits': splits, 'left_out': tuple(facts['left_out'])})
    dtypes = ('uint32',) if dataset.masked else ('uint16', 'uint32')
    if set(splits) != {'train', 'validation'} or dataset.dtype not in dtypes:
        raise TypeError('splits or dtype')
    if dataset.end_of_document >= dataset.vocab_size or dataset.vocab_size - 1 > np.iinfo(dataset.dtype).max:
        raise TypeError(f'vocab_size is {dataset.vocab_size}, end_of_document {dataset.end_of_document}')
    for entry in dataset.left_out:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ('name', 'reason')):
            raise TypeError('left_out is not a list of names and reasons')
    names = [dataset.tokenizer_file, *(shard.name for split in splits.values() for shard in split.shards)]
    for name in names:
        if not is_file_name(name):
            raise TypeError(f'a file named {name!r}')
    for name, split in splits.items():
        if split.documents and not split.tokens:
            raise TypeError(f'{name} has documents without tokens')
        if dataset.chat:
            _build(PairCounts if dataset.preferences else ChatCounts, dataset.chat[name])
    if dataset.preferences and not (dataset.masked and dataset.packed_window):
        raise TypeError('preferences that are not masked and packed')
    return dataset


def _build(cls: Callable[..., T], facts: dict[str, Any]) -> T:
    """A dataclass from exactly its fields, each of its type; TypeError names what is not."""
    kinds = typing.get_type_hints(cls)
    if set(facts) != set(kinds):
        raise TypeError(f'keys {sorted(set(facts) ^ set(kinds))}')
    for name, kind in kinds.items():
        # A path is a subclass of Path; of dict[…] and tuple[…] the kind of container is checked.
        value = facts[name]
        if not isinstance(value, typing.get_origin(kind) or kind) or not _is_in_range(name, value, kind):
            raise TypeError(f'{name} is {repr(value)[:200]}')
    return cls(**facts)


def _is_in_range(name: str, value: Any, kind: Any) -> bool:
    if kind is float:
        return math.isfinite(value) and value >= 0 and (name != 'share' or value <= 1)
    if kind is int:
        smallest, largest = BOUNDS.get(name, BOUNDS_OF_COUNTS)
        # JSON's `true` is an int for Python.
        return not isinstance(value, bool) and smallest <= value <= largest
    return True


def is_file_name(name: str) -> bool:
    """Returns whether `name` names a file in a data set's directory, and leads nowhere else."""
    return name == os.path.basename(name) and name not in ('', '.', '..') and '\0' not in name and len(name) < 256


def _size(directory: Path, name: str) -> int:
    try:
        return (directory / name).stat().st_size
    except OSError as error:
        raise InputError(f'{directory / name}: {os_message(error)}; {remedy(directory)}') from error


def _sync_and_hash(path: Path) -> tuple[str, int]:
    with path.open('rb') as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, 'sha256').hexdigest(), file.tell()


def reason_of(error: Exception) -> str:
    """What the system says of a failure, in a line."""
    return os_message(error) if isinstance(error, OSError) else str(error)


def remedy(path: Path) -> str:
    """Returns the remedy for a data set in directory `path` that is damaged or incomplete."""
    return f'copy {path} again, or run maxlm.prepare again with another --output'
