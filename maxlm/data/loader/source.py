"""Sources of training data: prepared datasets on a disk, in a bucket, or still in preparation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlm.config.schema import DataConfig
from maxlm.data.dataset.preparation import STOPPED, is_preparing, load_current, manifest_version, stop_reason
from maxlm.data.dataset.records import DatasetManifest, Shard, check_unlisted_files, load_manifest
from maxlm.data.dataset.shard_cache import fetch_manifest
from maxlm.data.dataset.token_reader import OPEN_SHARDS
from maxlm.data.loader.document_rows import DocumentSequences
from maxlm.data.loader.windows import Sequences
from maxlm.errors import InputError
from maxlm.formatting import format_percent
from maxlm.storage.download import RemoteFile
from maxlm.storage.retry import OnWarning

# Start of the names of Hugging Face datasets, which a run prepares itself.
HUB = 'hf:'
# Interval between checks for the first shards of a dataset in preparation, and seconds until the wait is reported.
POLL_SECONDS = 0.2
REPORT_SECONDS = 10.0
# Above this fraction of lost tokens, packed rows are refused: the data has hardly any boundaries.
MAX_LOST_FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class Source:
    """One entry of `data.sources`, or the dataset of `data.path`.

    Attributes:
        name: name in logs and metrics.
        dataset: the dataset that contains the shards.
        only: the single source of the dataset whose shards are used; '' = all sources.
        weight: relative weight of the source in the training rows.
        url: URL of the bucket that contains the shards; '' = all shards are local.
        is_growing: True if the dataset is still being prepared, and contains the first shards only.
    """

    name: str
    dataset: DatasetManifest
    only: str
    weight: float
    url: str
    is_growing: bool = False

    @property
    def display_name(self) -> str:
        """Name in error messages."""
        return f'{self.dataset.path}#{self.only}' if self.only else str(self.dataset.path)

    def windows(
        self,
        split: str,
        data: DataConfig,
        *,
        beginning_of_document: Sequence[int] | None = None,
        marked: bool = False,
    ) -> Sequences:
        """Returns the rows of a split. Those of the train split depend on `data.rows`.

        Raises:
            InputError: the documents cannot be packed, or a shard is damaged.
        """
        if split == 'train' and data.rows != 'stream':
            return self._document_rows(data, beginning_of_document)
        # A deleted file uses disk space until it is closed, so files of the previous pool must not stay open.
        max_open = data.shuffle_shards if self.url and data.cache_limit_gib and data.shuffle_shards else OPEN_SHARDS
        return Sequences(
            self.dataset,
            split,
            data.seq_len,
            shards=self.shards(split),
            isolate_documents=data.document_mask,
            train_first_token=data.train_first_token,
            beginning_of_document=beginning_of_document,
            marked=marked,
            fetched=bool(self.url),
            max_open=max_open,
        )

    def row_summary(self, data: DataConfig) -> str:
        """Returns a line about the packed rows of an epoch; '' for rows of the stream."""
        if data.rows == 'stream' or self.is_growing:
            return ''
        rows = self._document_rows(data)
        counts = rows.index.counts
        kept = counts.tokens - counts.lost_tokens
        return (
            f'{self.display_name}: {len(rows):,} rows with data.rows={data.rows}, {kept:,} of {counts.tokens:,} tokens '
            f'in an epoch; {counts.cut_documents:,} of {counts.documents:,} documents are cut, which loses '
            f'{format_percent(counts.lost_tokens / max(1, counts.tokens))} of the tokens'
        )

    def _document_rows(self, data: DataConfig, beginning_of_document: Sequence[int] | None = None) -> DocumentSequences:
        """Returns the packed rows of the train split. Raises InputError if this is not possible."""
        reason = ''
        if self.url:
            reason = (
                'is in a bucket, but the lengths of all documents are needed before the first step; copy it to a disk'
            )
        elif self.is_growing:
            reason = 'is still being prepared; start the run when it is complete'
        elif self.dataset.masked:
            reason = 'contains conversations, whose documents are packed with maxlm prepare --pack-seq-len'
        if reason:
            raise InputError(f'data.rows={data.rows}: {self.display_name} {reason}, or set data.rows=stream')
        rows = DocumentSequences(
            self.dataset,
            'train',
            data.seq_len,
            shards=self.shards('train'),
            keeps_rests=data.rows == 'best_fit',
            cache=Path(data.cache_dir).expanduser(),
            isolate_documents=data.document_mask,
            train_first_token=data.train_first_token,
            beginning_of_document=beginning_of_document,
        )
        counts = rows.index.counts
        if counts.lost_tokens > MAX_LOST_FRACTION * counts.tokens:
            raise InputError(
                f'data.rows={data.rows}: {self.display_name} has {counts.documents:,} documents in {counts.tokens:,} '
                f'tokens, so rows of data.seq_len={data.seq_len} tokens would lose '
                f'{format_percent(counts.lost_tokens / counts.tokens)} of the tokens; set '
                'data.rows=best_fit or stream, or prepare text with document boundaries'
            )
        return rows

    def shards(self, split: str) -> list[Shard]:
        return [shard for shard in self.dataset.splits[split].shards if self.only in ('', shard.source)]

    def remote_files(self, shards: Iterable[Shard]) -> tuple[RemoteFile, ...]:
        """Returns the remote files of `shards`; empty if the dataset is local."""
        if not self.url:
            return ()
        path = self.dataset.path
        return tuple(RemoteFile(f'{self.url}/{s.name}', path / s.name, s.bytes, s.sha256) for s in shards)


class OpenedDataset(NamedTuple):
    """An opened dataset.

    Attributes:
        dataset: the dataset.
        url: its URL; '' if it is local.
        is_growing: see `Source`.
    """

    dataset: DatasetManifest
    url: str
    is_growing: bool


def open_dataset(path: str, data: DataConfig, on_warning: OnWarning) -> OpenedDataset:
    """Opens the dataset of an entry of `data.sources`. Of a remote dataset, only the manifest is downloaded.

    Raises:
        InputError: there is no dataset, or it is damaged.
    """
    if path.startswith(HUB):
        return _open_local(hub_directory(path, data), on_warning, owner=path)
    protocol, separator, rest = path.partition('://')
    if not separator:
        return _open_local(Path(path), on_warning)
    # Any URL maps to a path below the cache directory, because files there are deleted to free space.
    below = [part for part in rest.split('/') if part not in ('', '.', '..')]
    directory = Path(data.cache_dir).expanduser().joinpath(protocol, *below)
    manifest = fetch_manifest(path, directory, on_warning=on_warning)
    return OpenedDataset(load_manifest(directory, complete=False), manifest.url, is_growing=False)


def _open_local(directory: Path, on_warning: OnWarning, owner: str = '') -> OpenedDataset:
    """Opens a local dataset. Waits for the first shards if it is being prepared."""
    began, reported = time.monotonic(), False
    # Checked first, so that the shards of a preparation that ends in between are found.
    while (preparing := is_preparing(directory)) and not manifest_version(directory):
        if not reported and time.monotonic() - began >= REPORT_SECONDS:
            reported = True
            on_warning(f'waiting for the preparation of {directory}')
        time.sleep(POLL_SECONDS)
    if not manifest_version(directory) and not preparing:
        if (reason := stop_reason(directory)) != STOPPED:
            raise InputError(f'the preparation of {directory} {reason}; correct this and run maxlm prepare again')
        if owner:
            raise InputError(
                f'{owner} is not prepared: {directory} contains no data set; train on it with maxlm train, which '
                'prepares it, or use the data.cache_dir and data.tokenizer of the run'
            )
    dataset, is_complete = load_current(directory)
    check_unlisted_files(dataset)
    return OpenedDataset(dataset, '', is_growing=not is_complete)


def hub_directory(entry: str, data: DataConfig) -> Path:
    """Returns the local directory in which the run prepares a Hugging Face dataset."""
    key = hashlib.sha256(json.dumps([entry, data.tokenizer]).encode()).hexdigest()
    return Path(data.cache_dir).expanduser() / 'prepared' / f'{source_name(entry)}-{key[:12]}'


def source_name(entry: str) -> str:
    """Returns the name of an entry of `data.sources` in logs and metrics."""
    path, _, source = entry.partition('#')
    if path.startswith(HUB):
        path, source = path.removeprefix(HUB).partition('@')[0].partition(':')[0], ''
    return source or path.rstrip('/').rpartition('/')[2]
