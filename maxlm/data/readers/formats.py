"""The table of formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxlm.data.documents import Document, OnBad
from maxlm.data.inputs import InputFile
from maxlm.data.readers import hub, jsonl, parquet, text, tfds, tokens
from maxlm.data.readers.options import ReadOptions
from maxlm.data.storage import StorageError, shown
from maxlm.errors import InputError


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


def find_format(asked: str, files: Sequence[InputFile], *, text_key: str) -> str:
    """What lines of JSONL are (see `ReadOptions.format`): as `asked`, but of `auto` only where there are conversations.

    That is seen at the first line of the first file of each source: a corpus may have very many files. Where it is a
    preference, all must be.

    Raises:
        InputError: only conversations, or preferences, are asked for, and a file is no JSONL; some sources hold
            preferences, and others do not; or a file cannot be read.
    """
    if asked == 'auto':
        options = ReadOptions(text_key=text_key)
        firsts = {file.source: file for file in reversed(files) if file.kind == 'jsonl'}
        try:
            found = {source: jsonl.first_format(file, options) for source, file in firsts.items()}
        except StorageError as error:
            raise InputError(str(error)) from error
        if 'preference' not in found.values():
            return 'auto' if 'chat' in found.values() else 'text'
        pairs = next(file for source, file in firsts.items() if found[source] == 'preference')
        for file in files:
            if found.get(file.source) != 'preference':
                raise InputError(
                    f'{shown(pairs.path)} holds preferences, and {shown(file.path)} does not; prepare them apart'
                )
        asked = 'preference'
    if asked in ('chat', 'preference'):
        for file in files:
            if file.kind != 'jsonl':
                what = 'conversations' if asked == 'chat' else 'preferences'
                raise InputError(f'--format={asked}: {shown(file.path)} is no JSONL, which {what} come in')
    return asked
