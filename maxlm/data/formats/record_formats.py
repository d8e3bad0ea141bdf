"""Input formats by name, and detection of the record format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats import hf_datasets, jsonl, parquet, text, tfds, token_files
from maxlm.data.formats.input_file import InputFile
from maxlm.errors import InputError
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path


class Reader(NamedTuple):
    """Reader of a format.

    Attributes:
        bounds: maps a file to the byte offsets of its units: the start of each unit, in ascending order from 0, and the
            end of the last one. Files are only split between units. Empty if the file is damaged or cannot be split.
            Raises StorageError if the file cannot be read.
        read: maps (file, start, stop, options, on_bad) to the documents that start in units [start, stop), in order.
            `stop` may be far beyond the end.
    """

    bounds: Callable[[InputFile], Sequence[int]]
    read: Callable[[InputFile, int, int, ReadOptions, OnBad], Iterator[Document]]


READERS = {
    'text': Reader(text.bounds, text.read),
    'jsonl': Reader(jsonl.bounds, jsonl.read),
    'parquet': Reader(parquet.bounds, parquet.read),
    'tokens': Reader(token_files.bounds, token_files.read),
    'tfds': Reader(tfds.bounds, tfds.read),
    'hub': Reader(hf_datasets.bounds, hf_datasets.read),
}

# Functions that detect the format of the first record or of the columns, by kind of the file.
FIRST_FORMATS: dict[str, Callable[[InputFile, ReadOptions], str]] = {
    'jsonl': jsonl.first_format,
    'parquet': parquet.first_format,
    'hub': hf_datasets.first_format,
}


def find_format(requested: str, files: Sequence[InputFile], *, text_key: str, messages_field: str = '') -> str:
    """Returns the record format (see `ReadOptions.format`): `requested`, or the detected format if it is `auto`.

    The format is detected from the first line or the columns of the first file of each source, because a corpus may
    have very many files. If one source contains preferences, all files must. If no source contains conversations, the
    result is `text`. With a `messages_field`, `auto` stays `auto`.

    Raises:
        InputError: conversations or preferences are requested, but a file has no records; only some sources contain
            preferences; or a file cannot be read.
    """
    if requested == 'auto':
        if messages_field:
            return 'auto'
        options = ReadOptions(text_key=text_key)
        firsts = {file.source: file for file in reversed(files) if file.kind in FIRST_FORMATS}
        try:
            found = {source: FIRST_FORMATS[file.kind](file, options) for source, file in firsts.items()}
        except StorageError as error:
            raise InputError(str(error)) from error
        if 'preference' not in found.values():
            return 'auto' if 'chat' in found.values() else 'text'
        pairs = next(file for source, file in firsts.items() if found[source] == 'preference')
        for file in files:
            if file.kind not in FIRST_FORMATS or found.get(file.source) != 'preference':
                raise InputError(
                    f'{display_path(pairs.path)} contains preferences, and {display_path(file.path)} does not; '
                    'prepare them separately'
                )
        requested = 'preference'
    if requested in ('chat', 'preference'):
        for file in files:
            if file.kind not in FIRST_FORMATS:
                what = 'conversations' if requested == 'chat' else 'preferences'
                raise InputError(
                    f'--format={requested}: {display_path(file.path)} is not JSONL, Parquet or a data set of the hub, '
                    f'which {what} require; skip files of directories with --exclude'
                )
    return requested
