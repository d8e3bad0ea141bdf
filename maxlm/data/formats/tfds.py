"""Reads TensorFlow Datasets that are prepared on this machine or in a bucket.

    tfds:NAME[/CONFIG][:VERSION][#SPLIT]    from the directory in the environment variable TFDS_DATA_DIR
    tfds:DIRECTORY[#SPLIT]                  the directory with the `dataset_info.json` of one version

The default SPLIT is `train`. ArrayRecord supports random access. TFRecord is read in ranges, which needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.field_names import nested_names
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.rows import checked_rows, column_fault, row_document
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError

PREFIX = 'tfds:'
# Number of examples read together.
BATCH_EXAMPLES = 64


def find(spec: str) -> InputFile:
    """Returns the input file of a spec `tfds:…`.

    Raises:
        InputError: the dataset, version or split does not exist, or the dataset is not prepared.
    """
    builder, split = _open(spec), _split(spec)
    if split not in builder.info.splits:
        splits = ', '.join(builder.info.splits) or 'none: the data set is not prepared there'
        raise InputError(f'{spec}: no split {split!r} in {builder.data_dir}; available: {splits}')
    files = sorted(builder.data_path.iterdir())
    versions = [(file.name, stat.length, stat.mtime) for file in files for stat in (file.stat(),)]
    version = hashlib.sha256(repr(versions).encode()).hexdigest()
    size = int(builder.info.splits[split].num_bytes)
    return InputFile(spec, f'{builder.info.full_name}#{split}', builder.info.name, 'tfds', size, version)


def bounds(file: InputFile) -> Sequence[int]:
    """Returns the unit boundaries. Units are examples, assumed to be of equal size."""
    try:
        count = _opened(file.path, file.version).info.splits[_split(file.path)].num_examples
    except KeyError:
        return ()
    unit = max(file.size // max(count, 1), 1)
    return range(0, count * unit + 1, unit)


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the texts of examples [start, stop); see `record_formats.Reader`. Names are `DATASET#SPLIT:EXAMPLE`."""
    options = dataclasses.replace(options, format='text')
    try:
        builder = _opened(file.path, file.version)
        features = _as_dict(builder.info.features or {})
        if fault := column_fault(sorted(features), options, nested_names(features)):
            on_bad(file.name, f'{file.path}: {fault}')
            return
        examples = checked_rows(_examples(builder, _split(file.path), start, stop), file.path)
        for number, example in enumerate(examples, start):
            yield from row_document(file, str(number), example, options, on_bad)
    except StorageError as error:
        on_bad(file.name, str(error))


def _as_dict(features: Any) -> dict[str, Any]:
    """Returns the features by name, with nested dictionaries of features."""
    return {name: _as_dict(value) if hasattr(value, 'items') else value for name, value in features.items()}


def _examples(builder: Any, split: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
    stop = min(stop, builder.info.splits[split].num_examples)
    try:
        source = builder.as_data_source(split=split)
    except NotImplementedError:
        # TFDS raises this for formats without random access, e.g. TFRecord.
        yield from _stored_in_order(builder, split, start, stop)
        return
    for first in range(start, stop, BATCH_EXAMPLES):
        yield from source.__getitems__(list(range(first, min(first + BATCH_EXAMPLES, stop))))


def _stored_in_order(builder: Any, split: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
    import tensorflow_datasets  # slow to import

    instruction = tensorflow_datasets.core.ReadInstruction(split, from_=start, to=stop, unit='abs')
    # Read one file at a time; reading several would interleave their examples.
    config = tensorflow_datasets.ReadConfig(interleave_cycle_length=1)
    dataset = builder.as_dataset(split=instruction, shuffle_files=False, read_config=config)
    yield from tensorflow_datasets.as_numpy(dataset)


def _split(spec: str) -> str:
    return spec.partition('#')[2] or 'train'


@functools.lru_cache(maxsize=4)
def _opened(spec: str, version: str) -> Any:
    # The version is part of the cache key, to distinguish a dataset from its predecessor in the same directory.
    return _open(spec)


def _open(spec: str) -> Any:
    directory = spec.removeprefix(PREFIX).partition('#')[0]
    if not directory:
        raise InputError(f'{spec}: give tfds:NAME[/CONFIG][:VERSION][#SPLIT] or tfds:DIRECTORY[#SPLIT]')
    import tensorflow_datasets  # slow to import

    try:
        if filesystem.is_url(directory) or os.path.isdir(directory):
            return tensorflow_datasets.builder_from_directory(directory)
        return tensorflow_datasets.builder(directory, data_dir=os.environ.get('TFDS_DATA_DIR') or None, try_gcs=False)
    # TFDS raises many exception types and lists all known datasets. The first line contains the cause.
    except Exception as error:
        first_line = str(error).partition('\n')[0][:300]
        raise StorageError(f'{spec}: {first_line or type(error).__name__}') from error
