"""The table of formats."""

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
    'tokens': Reader(token_files.bounds, token_files.read),
    'tfds': Reader(tfds.bounds, tfds.read),
    'hub': Reader(hf_datasets.bounds, hf_datasets.read),
}

# The format that the first record of a file has, or its columns, by kind of the file.
FIRST_FORMATS: dict[str, Callable[[InputFile, ReadOptions], str]] = {
    'jsonl': jsonl.first_format,
    'parquet': parquet.first_format,
    'hub': hf_datasets.first_format,
}


def find_format(requested: str, files: Sequence[InputFile], *, text_key: str, messages_field: str = '') -> str:
    """What records are (see `ReadOptions.format`): as `asked`, but of `auto` only where there are conversations.

    That is seen at the first line of the first file of each source, or at its columns: a corpus may have very many
    files. Where it is a preference, all must be. With a `messages_field` there are conversations.

    Raises:
        InputError: only conversations, or preferences, are asked for, and a file has no records; some sources hold
            preferences, and others do not; or a file cannot be read.
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
                    f'{display_path(pairs.path)} holds preferences, and {display_path(file.path)} does not; '
                    'prepare them apart'
                )
        requested = 'preference'
    if requested in ('chat', 'preference'):
        for file in files:
            if file.kind not in FIRST_FORMATS:
                what = 'conversations' if requested == 'chat' else 'preferences'
                raise InputError(
                    f'--format={requested}: {display_path(file.path)} is no JSONL, Parquet or data set of the hub, '
                    f'which {what} come in; --exclude leaves out files of directories'
                )
    return requested
