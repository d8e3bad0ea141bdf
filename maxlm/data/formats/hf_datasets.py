"""Reads Hugging Face datasets, streamed from the Hub or from a local directory.

    hf:NAME[:CONFIG][@REVISION][#SPLIT]     streamed from the Hub
    hf:DIRECTORY[#SPLIT]                    written by `save_to_disk`, or Parquet or JSONL files with a README

The default SPLIT is `train`. A name is resolved to a commit once, so that all workers read the same version.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.field_names import nested_names
from maxlm.data.documents.parse_record import columns_format
from maxlm.data.documents.read_options import MAX_RECORD_BYTES, ReadOptions
from maxlm.data.formats import parquet
from maxlm.data.formats.hf_files import limit_files, parquet_file
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.rows import checked_rows, column_fault, record_fields, row_document
from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError, classify_error, short_message, storage_errors

PREFIX = 'hf:'
SPELLING = 'hf:NAME[:CONFIG][@REVISION][#SPLIT] or hf:DIRECTORY[#SPLIT]'
# Files that `save_to_disk` writes beside the data: of a data set, and of a dictionary of splits.
SAVED_FILES = ('state.json', 'dataset_dict.json')
# End of the version of a dataset of which only the first files are read.
_PART = re.compile(r', (\d+) of \d+ files$')
_SPEC = re.compile(r'(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@#]+))?(@(?P<revision>[^#]+))?')


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Parsed spec of a dataset. `directory` is '' for a dataset on the Hub."""

    directory: str
    name: str
    config: str
    revision: str
    split: str

    def __str__(self) -> str:
        config, revision = self.config and f':{self.config}', self.revision and f'@{self.revision}'
        return f'{PREFIX}{self.directory or self.name}{config}{revision}#{self.split or "train"}'


def find(spec_text: str, max_record_bytes: int = MAX_RECORD_BYTES, max_files: int = 0) -> InputFile:
    """Returns the input file of a spec `hf:…`. Lines of its files may have up to `max_record_bytes`.

    If the dataset is streamed, at most its first `max_files` files are read; 0 = all.

    Raises:
        InputError: the spec is malformed, the dataset, configuration, revision or split does not exist or cannot be
            accessed, or the package `datasets` is not installed.
    """
    spec = _parse(spec_text)
    if spec.directory:
        versions = [(entry.name, entry.size, entry.version) for entry in filesystem.walk(spec.directory)]
        size = sum(size for _, size, _ in versions)
        version = hashlib.sha256(json.dumps(sorted(versions)).encode()).hexdigest()
        source = os.path.basename(os.path.realpath(spec.directory))
        name = source
    else:
        spec = dataclasses.replace(spec, revision=_commit(spec_text, spec))
        size, version = 0, spec.revision
        name, source = spec.name + (spec.config and f':{spec.config}'), spec.name.rsplit('/', 1)[-1]
    limit_files(_datasets(spec_text), ReadOptions(max_record_bytes=max_record_bytes))
    dataset = _open(str(spec), version)
    if not spec.directory:
        size = _size(dataset, spec)
    if max_files and _is_streamed(dataset) and dataset.num_shards > max_files:
        size = max_files * max(size // dataset.num_shards, 1)
        version = f'{version}, {max_files} of {dataset.num_shards} files'
    return InputFile(str(spec), f'{name}#{spec.split or "train"}', source, 'hub', size, version)


def is_saved(directory: str) -> bool:
    """Returns True if `save_to_disk` wrote a local directory."""
    state, splits = (os.path.join(directory, name) for name in SAVED_FILES)
    return os.path.isfile(splits) or (os.path.isfile(state) and os.path.isfile(f'{directory}/dataset_info.json'))


def pin(spec_text: str) -> str:
    """Returns a spec `hf:…` with the commit that its name and revision currently refer to.

    Raises:
        InputError: see `find`.
    """
    spec = _parse(spec_text)
    return spec_text if spec.directory else str(dataclasses.replace(spec, revision=_commit(spec_text, spec)))


def bounds(file: InputFile) -> Sequence[int]:
    """Returns the unit boundaries. Units are rows if `save_to_disk` wrote the dataset, else shards, of equal sizes."""
    dataset = _open(file.path, file.version)
    count = dataset.num_shards if _is_streamed(dataset) else len(dataset)
    if part := _PART.search(file.version):
        count = min(count, int(part[1]))
    unit = max(file.size // max(count, 1), 1)
    return range(0, count * unit + 1, unit)


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the documents of units [start, stop); see `record_formats.Reader`.

    Names are `DATASET:ROW`, or `DATASET:SHARD:ROW` for streamed datasets.
    """
    try:
        limit_files(_datasets(file.path), options)
        dataset = streamed = _open(file.path, file.version)
        columns, nested = _columns(dataset, file, options)
        if fault := column_fault(columns, options, nested):
            on_bad(file.name, f'{file.path}: {fault}')
            return
        # Select columns first: some formats then do not even download the remaining columns.
        dataset = dataset.select_columns(record_fields(columns, options))
        if not _is_streamed(dataset):
            rows = dataset.select(range(start, min(stop, len(dataset))))
            for number, row in enumerate(checked_rows(rows, file.path), start):
                yield from row_document(file, str(number), row, options, on_bad)
            return
        for shard in range(start, min(stop, dataset.num_shards)):
            if path := parquet_file(streamed, shard):
                part = dataclasses.replace(file, path=path, name=f'{file.name}:{shard}', kind='parquet')
                yield from parquet.read(part, 0, sys.maxsize, options, on_bad)
                continue
            rows = dataset.shard(num_shards=dataset.num_shards, index=shard)
            for number, row in enumerate(checked_rows(rows, file.path)):
                yield from row_document(file, f'{shard}:{number}', row, options, on_bad)
    except StorageError as error:
        on_bad(file.name, str(error))


def first_format(file: InputFile, options: ReadOptions) -> str:
    """Returns the format detected from the columns: `preference`, `chat` or `text`."""
    columns, nested = _columns(_open(file.path, file.version), file, options)
    return columns_format([*columns, *nested], options)


def _columns(dataset: Any, file: InputFile, options: ReadOptions) -> tuple[list[str], list[str]]:
    """Returns the names of the columns and of their nested fields."""
    if dataset.column_names and dataset.features:
        return dataset.column_names, parquet.nested_columns(dataset.features.arrow_schema)
    # A stream may know its columns only after its first row.
    row = next(checked_rows(dataset, file.path), {options.text_key: ''})
    return dataset.column_names or list(row), nested_names(row)


def _parse(spec_text: str) -> _Spec:
    rest, _, split = spec_text.removeprefix(PREFIX).partition('#')
    if os.path.isdir(rest):
        return _Spec(rest, '', '', '', split)
    match = _SPEC.fullmatch(rest)
    if match is None:
        raise InputError(f'{spec_text}: not a directory or the name of a data set; use {SPELLING}')
    parts = match.groupdict(default='')
    return _Spec('', parts['name'], parts['config'], parts['revision'], split)


@functools.lru_cache(maxsize=4)
def _open(spec_text: str, version: str) -> Any:
    """Returns the `datasets.Dataset` or `IterableDataset`. `version` is only part of the cache key."""
    datasets = _datasets(spec_text)
    spec = _parse(spec_text)
    split = spec.split or 'train'
    try:
        if not spec.directory:
            return datasets.load_dataset(
                spec.name, spec.config or None, split=split, revision=spec.revision, streaming=True
            )
        directory = Path(spec.directory)
        if (directory / 'state.json').exists():
            if split != 'train':
                raise ValueError(f"contains one unnamed split; remove '#{split}'")
            return datasets.load_from_disk(spec.directory)
        if (directory / 'dataset_dict.json').exists():
            splits = datasets.load_from_disk(spec.directory)
            if split not in splits:
                raise ValueError(f'no split {split!r}; available: {", ".join(splits)}')
            return splits[split]
        return datasets.load_dataset(spec.directory, split=split, streaming=True)
    except (ValueError, FileNotFoundError) as error:
        # These messages of `datasets` describe names, configurations and splits that do not exist.
        raise StorageError(f'{spec_text}: {short_message(spec_text, error)}') from error
    # Other exceptions come from the network, the Hub and the libraries of all formats.
    except Exception as error:
        raise classify_error(spec_text, error) from error


def _commit(spec_text: str, spec: _Spec) -> str:
    """Returns the commit that the name and revision currently refer to."""
    _datasets(spec_text)
    import huggingface_hub  # part of an extra

    with storage_errors(spec_text):
        return str(huggingface_hub.HfApi().dataset_info(spec.name, revision=spec.revision or None).sha)


def _size(dataset: Any, spec: _Spec) -> int:
    """Returns the size in bytes of a dataset on the Hub: of the split, else the download, else all its files."""
    split = (dataset.info.splits or {}).get(spec.split or 'train')
    if known := (split and split.num_bytes) or dataset.info.download_size:
        return int(known)
    import huggingface_hub  # part of an extra

    with storage_errors(str(spec)):
        info = huggingface_hub.HfApi().dataset_info(spec.name, revision=spec.revision, files_metadata=True)
    return sum(file.size or 0 for file in info.siblings or ())


def _is_streamed(dataset: Any) -> bool:
    return not hasattr(dataset, '__len__')


def _datasets(spec_text: str) -> ModuleType:
    try:
        import datasets  # an extra, and slow to import
    except ImportError as error:
        raise InputError(f'{spec_text} needs datasets: {pip_install("hub")}') from error
    return datasets
