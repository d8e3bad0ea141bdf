"""Record format: shards of token blocks in ArrayRecord, and the manifest `dataset.json`, which describes a data set.

A split (`train`, `validation`) is a list of shards. A shard is a stream of tokens: complete documents, each followed by
the end-of-document token. Record i of a shard contains stream[i · block : (i + 1) · block + 1] as little-endian
integers. It shares its last token with the next record, so a sequence within one block includes its targets. The last
record is shorter. The tokens of a masked data set (conversations) have flags: see `token_flags`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import typing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from maxlm.data.chat.packing import ChatCounts, PairCounts
from maxlm.data.chat.template import CHAT_TEMPLATE_FILE
from maxlm.data.dataset.manifest_files import (
    MANIFEST_NAME,
    TOKENIZER_SIBLINGS,
    check_names,
    check_sizes,
    remedy,
    verify_checksums,
)
from maxlm.data.tokenizer.text_boundaries import TEXT_BOUNDARIES_FILE
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import atomic_write
from maxlm.storage.check_directory import check_entries, find_entries
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

FORMAT_VERSION = 2
# Keys of `made_from` if shards can be used during the preparation: the option, and a checksum of all their inputs.
STREAM, STREAM_INPUTS = 'stream', 'stream_inputs'
# Fields that only the manifest of a masked data set contains, with their defaults.
UNMASKED: dict[str, Any] = {'masked': False, 'packed_window': 0, 'chat_template_sha256': '', 'chat': {}}
# Fields that only the manifest of a data set with preferences contains, with their defaults.
NO_PREFERENCES: dict[str, Any] = {'preferences': False}
# Fields that only the manifest of a data set with the tokenizer of another model contains, with their defaults.
OWN_TOKENIZER: dict[str, Any] = {'beginning_of_document': (), 'text_boundaries_sha256': ''}
# Bounds of the integers in the manifest. Two of the 32 bits of a token are reserved for flags: see `token_flags`.
BOUNDS = {'vocab_size': (1, 2**30), 'block': (1, 2**31 - 1), 'packed_window': (0, 2**31 - 1)}
BOUNDS_OF_COUNTS = (0, 2**62)

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records from one source.

    Attributes:
        name: name of the file.
        source: name of the source.
        tokens: number of tokens.
        documents: number of documents.
        bytes: size of the file.
        sha256: checksum of the file.
    """

    name: str
    source: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class SourceCounts:
    """Counts of one source in a split.

    Attributes:
        documents: number of documents.
        tokens: number of tokens.
        text_bytes: size of the text in UTF-8; 0 if unknown.
        share: fraction of the tokens of the split.
    """

    documents: int
    tokens: int
    text_bytes: int
    share: float


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of a data set.

    Attributes:
        documents: number of documents.
        tokens: number of tokens, including one end-of-document token per document.
        text_bytes: size of the text in UTF-8; 0 if unknown.
        unigram_entropy: entropy of the token frequencies in nats per token: the loss of a model without context.
        sources: counts by name of the source.
        shards: the files.
    """

    documents: int
    tokens: int
    text_bytes: int
    unigram_entropy: float
    sources: dict[str, SourceCounts]
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class DatasetManifest:
    """Manifest of a data set.

    Attributes:
        path: directory of the data set.
        tokenizer: kind of the tokenizer: `bytes`, `chars`, `bpe`, `ids` or `file`.
        tokenizer_file, tokenizer_sha256: name and checksum of its `tokenizer.json`.
        vocab_size: token ids are 0 … vocab_size - 1.
        end_of_document: id of the token after each document.
        dtype: stored type of the tokens, `uint16` or `uint32`.
        block: tokens per record, without the shared token.
        splits: `train` and `validation`.
        left_out: names and reasons of the skipped records.
        made_from: options, and a checksum of the inputs.
        fingerprint: checksum of all tokens and of the format.
        masked: True if tokens have flags, so that only some are targets of the loss. `dtype` is then `uint32`.
        packed_window: tokens per packed sequence; 0 = not packed.
        chat_template_sha256: checksum of CHAT_TEMPLATE_FILE; '' = no template.
        chat: fields of `ChatCounts` or `PairCounts` for each split.
        preferences: True if each two documents of a sequence are the chosen and the rejected answer to one prompt, in
                        this order. A missing answer has one token. The last document of a sequence may be padding.
        beginning_of_document: ids at the beginning of each text document; empty for most tokenizers.
        text_boundaries_sha256: checksum of TEXT_BOUNDARIES_FILE; '' = the names of the tokens determine the boundaries.
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
    beginning_of_document: tuple[int, ...] = ()
    text_boundaries_sha256: str = ''

    @property
    def tokenizer_path(self) -> Path:
        return self.path / self.tokenizer_file

    def load_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer. Raises InputError unless its vocabulary and end of document are those of the tokens."""
        tokenizer = Tokenizer.load(self.tokenizer_path)
        for name in ('vocab_size', 'end_of_document'):
            expected, found = getattr(self, name), getattr(tokenizer, name)
            if found != expected:
                raise InputError(
                    f'{self.tokenizer_path} is not the tokenizer of the data set: its {name} is {found}, not '
                    f'{expected}; {remedy(self.path)}'
                )
        return tokenizer

    @property
    def is_streamed(self) -> bool:
        """True if the first epoch reads the shards in order, so that training can start during the preparation."""
        return bool(self.made_from.get(STREAM))

    @property
    def order_fingerprint(self) -> str:
        """Checksum of the tokens, or of all that determines them if the data set may still be in preparation."""
        return str(self.made_from.get(STREAM_INPUTS, self.fingerprint))

    @property
    def tokenizer_checksums(self) -> dict[str, str]:
        """Checksums of the files in addition to the shards: the tokenizer, and its boundaries and chat template."""
        optional = {
            TEXT_BOUNDARIES_FILE: self.text_boundaries_sha256,
            CHAT_TEMPLATE_FILE: self.chat_template_sha256,
        }
        return {
            self.tokenizer_file: self.tokenizer_sha256,
            **{name: checksum for name, checksum in optional.items() if checksum},
        }


def token_dtype(vocab_size: int) -> str:
    """Returns the stored type of token ids below `vocab_size`."""
    return 'uint16' if vocab_size <= 2**16 else 'uint32'


def save_manifest(dataset: DatasetManifest, name: str = MANIFEST_NAME) -> None:
    """Writes the manifest atomically. `dataset.json` completes the data set."""
    fields = {'format_version': FORMAT_VERSION, **dataclasses.asdict(dataset)}
    del fields['path']
    for field in (
        *(() if dataset.masked else UNMASKED),
        *(() if dataset.preferences else NO_PREFERENCES),
        *(() if dataset.text_boundaries_sha256 else OWN_TOKENIZER),
    ):
        del fields[field]
    atomic_write(dataset.path / name, (json.dumps(fields, indent=1) + '\n').encode())


def load_manifest(path: str | os.PathLike[str], *, complete: bool = True, name: str = MANIFEST_NAME) -> DatasetManifest:
    """Reads the data set in directory `path`. With `complete`, checks that all shards exist in full size.

    Files that are read must be regular files of the directory. The directory itself may be a link.

    Raises:
        InputError: there is no data set; the manifest is malformed or contradicts itself; or a file is missing, is not
            a regular file, links outside the directory, or has another size or checksum than the manifest.
    """
    path = Path(path)
    manifest = path / name
    check_entries(path, [name])
    try:
        fields = parse_json(read_bytes(manifest, limit=MAX_TEXT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f'{path} contains no data set ({MANIFEST_NAME} is missing); create one with '
            f'`maxlm prepare --input … --output {path}`'
        ) from None
    except OSError as error:
        raise InputError(f'{manifest}: {os_message(error)}; {remedy(path)}') from error
    except ValueError as error:
        raise InputError(f'{manifest} is not JSON ({error}); {remedy(path)}') from error
    try:
        dataset = _parse_manifest(path, fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{manifest} is malformed ({str(error)[:300]}); {remedy(path)}') from error
    sizes = {shard.name: shard.bytes for split in dataset.splits.values() for shard in split.shards}
    found = find_entries(path, sizes)
    if complete:
        check_sizes(path, sizes, found)
    # Also checks the files beside the tokenizer that the manifest does not list but readers of tokenizers open.
    check_entries(path, [dataset.tokenizer_file, *TOKENIZER_SIBLINGS])
    verify_checksums(path, dataset.tokenizer_checksums)
    return dataset


def check_unlisted_files(dataset: DatasetManifest) -> None:
    """Raises InputError if readers of the tokenizer would use a file that the manifest does not list."""
    for name in (TEXT_BOUNDARIES_FILE, CHAT_TEMPLATE_FILE):
        if name not in dataset.tokenizer_checksums and (dataset.path / name).exists():
            raise InputError(f'{dataset.path / name} is not listed in {MANIFEST_NAME}; remove it')


def verify(dataset: DatasetManifest) -> None:
    """Verifies the checksums of all files. Raises InputError for the first file that differs."""
    shards = {shard.name: shard.sha256 for split in dataset.splits.values() for shard in split.shards}
    verify_checksums(dataset.path, {**shards, **dataset.tokenizer_checksums})


def dataset_fingerprint(
    *,
    block: int,
    dtype: str,
    end_of_document: int,
    splits: dict[str, Split],
    masked: bool = False,
    preferences: bool = False,
) -> str:
    """Returns the SHA-256 of the checksums and sources of all shards and of the format of their tokens."""
    shards = {name: [(shard.source, shard.sha256) for shard in split.shards] for name, split in splits.items()}
    kinds = [*(['masked'] if masked else []), *(['preferences'] if preferences else [])]
    values = [FORMAT_VERSION, block, dtype, end_of_document, shards, *kinds]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _parse_manifest(path: Path, fields: Any) -> DatasetManifest:
    if not isinstance(fields, dict):
        raise TypeError('not an object')
    if (version := fields.pop('format_version')) != FORMAT_VERSION:
        raise InputError(
            f'{path / MANIFEST_NAME} has format {str(version)[:50]}, but this maxlm reads {FORMAT_VERSION}; '
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
        for name, split in fields['splits'].items()
    }
    fields = {**({} if 'masked' in fields else UNMASKED), **NO_PREFERENCES, **OWN_TOKENIZER, **fields}
    tuples = {name: tuple(fields[name]) for name in ('left_out', 'beginning_of_document')}
    dataset = _build(DatasetManifest, {**fields, 'path': path, 'splits': splits, **tuples})
    dtypes = ('uint32',) if dataset.masked else ('uint16', 'uint32')
    if set(splits) != {'train', 'validation'} or dataset.dtype not in dtypes:
        raise TypeError('invalid splits or dtype')
    if dataset.end_of_document >= dataset.vocab_size or dataset.vocab_size - 1 > np.iinfo(dataset.dtype).max:
        raise TypeError(f'vocab_size is {dataset.vocab_size}, end_of_document {dataset.end_of_document}')
    if not all(type(i) is int and 0 <= i < dataset.vocab_size for i in dataset.beginning_of_document):
        raise TypeError(f'beginning_of_document is {str(dataset.beginning_of_document)[:200]}')
    for entry in dataset.left_out:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ('name', 'reason')):
            raise TypeError('left_out is not a list of names and reasons')
    check_names([dataset.tokenizer_file, *(shard.name for split in splits.values() for shard in split.shards)])
    for name, split in splits.items():
        _check_counts(name, split)
        if dataset.chat:
            kind, absent = (PairCounts, {'labeled': 0}) if dataset.preferences else (ChatCounts, {})
            _build(kind, {**absent, **dataset.chat[name]})
    if dataset.preferences and not (dataset.masked and dataset.packed_window):
        raise TypeError('preferences that are not masked and packed')
    expected = dataset_fingerprint(
        block=dataset.block,
        dtype=dataset.dtype,
        end_of_document=dataset.end_of_document,
        splits=splits,
        masked=dataset.masked,
        preferences=dataset.preferences,
    )
    if dataset.fingerprint != expected:
        raise TypeError('fingerprint differs from that of its shards')
    return dataset


def _check_counts(name: str, split: Split) -> None:
    """Raises TypeError unless the counts of a split are the sums of its shards."""
    tokens, documents = Counter[str](), Counter[str]()
    for shard in split.shards:
        if shard.documents and not shard.tokens:
            raise TypeError(f'{shard.name} has documents without tokens')
        tokens[shard.source] += shard.tokens
        documents[shard.source] += shard.documents
    if unknown := tokens.keys() - split.sources.keys():
        raise TypeError(f'{name} has shards of the source {min(unknown)[:50]!r}, which it does not list')
    for key, total, sums in (('tokens', split.tokens, tokens), ('documents', split.documents, documents)):
        if total != sum(sums.values()):
            raise TypeError(f'{name} has {total:,} {key}, but its shards have {sum(sums.values()):,}')
        for source, counts in split.sources.items():
            if (listed := getattr(counts, key)) != sums[source]:
                raise TypeError(f'source {source[:50]!r} has {listed:,} {key}, but its shards have {sums[source]:,}')


def _build(cls: Callable[..., T], fields: dict[str, Any]) -> T:
    """Builds a dataclass from a dict with exactly its fields. Raises TypeError for a field of the wrong type."""
    kinds = _field_types(cls)
    if set(fields) != set(kinds):
        raise TypeError(f'keys {sorted(set(fields) ^ set(kinds))}')
    for name, kind in kinds.items():
        # isinstance accepts subclasses of Path. For dict[…] and tuple[…], only the container is checked.
        value = fields[name]
        if not isinstance(value, typing.get_origin(kind) or kind) or not _is_in_range(name, value, kind):
            raise TypeError(f'{name} is {repr(value)[:200]}')
    return cls(**fields)


# Slow, and called for each shard.
_field_types = functools.cache(typing.get_type_hints)


def _is_in_range(name: str, value: Any, kind: Any) -> bool:
    if kind is float:
        return math.isfinite(value) and value >= 0 and (name != 'share' or value <= 1)
    if kind is int:
        smallest, largest = BOUNDS.get(name, BOUNDS_OF_COUNTS)
        # bool is a subclass of int.
        return not isinstance(value, bool) and smallest <= value <= largest
    return True
