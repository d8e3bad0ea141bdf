"""Reads token files: streams of token ids that are split into documents at end-of-document tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, cast

import numpy as np

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.tokens.archive_layout import ZIP_ERRORS, ArchiveLayout, array_name, find_layout
from maxlm.data.formats.tokens.kept_spans import Companions, kept_spans
from maxlm.data.formats.tokens.token_arrays import TokenArray, TokenFileError, open_npy, open_raw
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path

# Number of tokens per read.
CHUNK_TOKENS = 2**20
# A block of this many tokens without an end of document ends the document. A multiple of CHUNK_TOKENS.
MAX_DOCUMENT_TOKENS = 2**24


def bounds(file: InputFile) -> Sequence[int]:
    """Returns the unit boundaries. Units are bytes of tokens in `.npy` and `.bin` files, and arrays in `.npz` files.

    An archive with arrays that describe the tokens, such as a mask, is one unit.
    """
    if not _is_archive(file):
        # The last range is smaller than stated by the size of the header.
        return range(file.size + 1)
    try:
        layout = _layout(file)
    except (TokenFileError, *ZIP_ERRORS):
        return ()
    if layout.describes_tokens:
        return ()
    return list(itertools.accumulate((member.compress_size for member in layout.streams), initial=0))


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the documents that start in units [start, stop); see `record_formats.Reader`.

    A document ends before the next `options.end_of_document`, which is not included. A block of MAX_DOCUMENT_TOKENS
    tokens without an end also ends the document. Each row of a two-dimensional array is a separate stream, without its
    padding if the archive has a mask or lengths (see `kept_spans`). Names are `FILE:TOKEN`, or `FILE:ARRAY:TOKEN` for
    `.npz`, with the index of the document's first token in the array.
    """
    path = display_path(file.path)
    try:
        with filesystem.open_file(file.path) as content:
            if _is_archive(file):
                yield from _read_archive(content, file, start, stop, options, on_bad)
                return
            try:
                array = _open_array(content, file, options.token_dtype)
                yield from _read_array(array, file, file.name, path, start, stop, options, on_bad)
            except TokenFileError as error:
                on_bad(file.name, f'{path}: {error}')
    except StorageError as error:
        on_bad(file.name, str(error))


def check_token_file(file: InputFile, token_dtype: str) -> None:
    """Raises InputError if the header of a file, or the names of the arrays of an archive, make it unreadable."""
    path = display_path(file.path)
    try:
        if _is_archive(file):
            _layout(file)
            return
        with filesystem.open_file(file.path) as content:
            _open_array(content, file, token_dtype)
    except TokenFileError as error:
        message = f'{path}: {error}'
        raise InputError(message) from error
    except ZIP_ERRORS as error:
        raise InputError(_damaged_archive(path, error)) from error


def _open_array(content: BinaryIO, file: InputFile, token_dtype: str) -> TokenArray:
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    return open_npy(content, size) if file.name.lower().endswith('.npy') else open_raw(content, size, token_dtype)


def _layout(file: InputFile) -> ArchiveLayout:
    with filesystem.open_file(file.path) as content, zipfile.ZipFile(content) as archive:
        return find_layout(archive)


# Each range of an archive needs the layout, which is found by reading the start of many arrays.
_cached_layout = functools.lru_cache(maxsize=1)(_layout)


def _read_archive(
    content: BinaryIO, file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad
) -> Iterator[Document]:
    path = display_path(file.path)
    try:
        archive, layout = zipfile.ZipFile(content), (_cached_layout if file.version else _layout)(file)
    except TokenFileError as error:
        on_bad(file.name, f'{path}: {error}')
        return
    except ZIP_ERRORS as error:
        on_bad(file.name, _damaged_archive(path, error))
        return
    for member in layout.streams[start:stop]:
        name, label = f'{file.name}:{member.filename.removesuffix(".npy")}', f'{path}, array {member.filename}'
        try:
            with contextlib.ExitStack() as stack:
                array = _open_member(archive, member, stack)
                spans = None
                if layout.describes_tokens:
                    companions = _open_companions(archive, layout, stack)
                    spans = kept_spans(array, companions, functools.partial(_report_row, on_bad, name, path))
                yield from _read_array(array, file, name, label, 0, array.num_bytes, options, on_bad, spans)
                # Padding at the end was not read.
                array.read_rest()
        except TokenFileError as error:
            on_bad(name, f'{label}: {error}')
        except ZIP_ERRORS as error:
            on_bad(name, f'{label}: damaged or truncated ({error}); fetch it again')


def _report_row(on_bad: OnBad, name: str, path: str, first: int, reason: str) -> None:
    on_bad(f'{name}:{first}', f'{path}: {reason}')


def _damaged_archive(path: str, error: Exception) -> str:
    return f'{path}: not a readable .npz file ({error}); fetch it again'


def _open_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: contextlib.ExitStack, kinds: str = 'iu'
) -> TokenArray:
    return open_npy(cast(BinaryIO, stack.enter_context(archive.open(member))), member.file_size, kinds=kinds)


def _open_companions(archive: zipfile.ZipFile, layout: ArchiveLayout, stack: contextlib.ExitStack) -> Companions:
    """Opens the arrays that describe the tokens. Raises TokenFileError with the name of an unusable array."""

    def opened(member: zipfile.ZipInfo, kinds: str) -> TokenArray:
        try:
            return _open_member(archive, member, stack, kinds)
        except TokenFileError as error:
            raise TokenFileError(f'{array_name(member)} {error}') from error

    return Companions(
        mask=opened(layout.mask, 'iubf') if layout.mask else None,
        labels=opened(layout.labels, 'iu') if layout.labels else None,
        lengths={array_name(member): opened(member, 'iu') for member in layout.lengths},
    )


def _read_array(
    array: TokenArray,
    file: InputFile,
    name: str,
    label: str,
    start: int,
    stop: int,
    options: ReadOptions,
    on_bad: OnBad,
    spans: Iterator[tuple[int, int]] | None = None,
) -> Iterator[Document]:
    limit = 2**32 if options.vocab_size is None else options.vocab_size
    end = options.end_of_document
    if spans is None:
        documents = _documents(array, start, stop, end)
    else:
        streams = (_cut_stream(array, begin, finish, begin, finish, end) for begin, finish in spans)
        documents = itertools.chain.from_iterable(streams)
    for first, ids in documents:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            place = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            row = f' (row {(first + place) // array.shape[-1]})' if array.has_rows else ''
            on_bad(
                f'{name}:{first}',
                f'{label}: token {first + place}{row} is {ids[place]}; ids must be from 0 to {limit - 1}',
            )
            continue
        yield Document(f'{name}:{first}', file.source, tokens=ids.astype(np.uint32))


def _documents(array: TokenArray, start: int, stop: int, end: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first token, ids) of the documents whose first token is in bytes [start, stop) of the tokens."""
    itemsize = array.dtype.itemsize
    # A header of a few bytes may claim any number of empty rows.
    if not array.length:
        return
    if not array.has_rows:
        yield from _cut_stream(array, 0, array.length, -(-start // itemsize), -(-stop // itemsize), end)
        return
    length = array.shape[-1]
    row_bytes = length * itemsize
    for row in range(-(-start // row_bytes), min(-(-stop // row_bytes), array.shape[0])):
        yield from _cut_stream(array, row * length, (row + 1) * length, row * length, (row + 1) * length, end)


def _cut_stream(
    array: TokenArray, begin: int, finish: int, start: int, stop: int, end: int | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first token, ids) of the documents of the stream [begin, finish) that start in [start, stop).

    Empty documents are included. A document starts at `begin` and after every end. One also starts at `begin` +
    MAX_DOCUMENT_TOKENS · k if the block of MAX_DOCUMENT_TOKENS tokens before it contains no end. This rule makes the
    starts computable without reading all previous tokens.
    """
    first = _first_start(array, begin, min(start, finish), finish, end)
    parts: list[np.ndarray] = []
    # A document that starts inside a block starts after an end in that block.
    seen_end = (first - begin) % MAX_DOCUMENT_TOKENS != 0
    for position, ids in _chunks(array, begin, first, finish):
        if first >= stop:
            return
        done = 0
        for i in _ends(ids, end):
            yield first, np.concatenate([*parts, ids[done:i]])
            first, done, parts, seen_end = position + i + 1, i + 1, [], True
            if first >= stop:
                return
        parts.append(ids[done:])
        if (position + len(ids) - begin) % MAX_DOCUMENT_TOKENS == 0:
            if not seen_end:
                yield first, np.concatenate(parts)
                first, parts = position + len(ids), []
            seen_end = False
    if parts and first < stop:
        yield first, np.concatenate(parts)


def _first_start(array: TokenArray, begin: int, start: int, finish: int, end: int | None) -> int:
    """Returns the index at or after `start` of the first token that starts a document, or `finish` if there is none."""
    if start == begin:
        return begin
    # An end at `start` - 1 also counts.
    position = start - 1
    while position < finish:
        block = begin + (position - begin) // MAX_DOCUMENT_TOKENS * MAX_DOCUMENT_TOKENS
        block_stop = min(block + MAX_DOCUMENT_TOKENS, finish)
        found = _find_end(array, position, block_stop, end)
        if found is not None:
            return found + 1
        if _find_end(array, block, position, end) is None:
            return block_stop
        position = block_stop
    return finish


def _find_end(array: TokenArray, start: int, stop: int, end: int | None) -> int | None:
    if end is None:
        return None
    for position in range(start, stop, CHUNK_TOKENS):
        ends = _ends(array.read(position, min(position + CHUNK_TOKENS, stop)), end)
        if ends:
            return position + ends[0]
    return None


def _chunks(array: TokenArray, begin: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first token, ids) from `start`. Chunks end at multiples of CHUNK_TOKENS after `begin`, or at `stop`."""
    while start < stop:
        chunk_stop = min(begin + ((start - begin) // CHUNK_TOKENS + 1) * CHUNK_TOKENS, stop)
        yield start, array.read(start, chunk_stop)
        start = chunk_stop


def _ends(ids: np.ndarray, end: int | None) -> list[int]:
    return [] if end is None else np.flatnonzero(ids == end).tolist()


def _is_archive(file: InputFile) -> bool:
    return file.name.lower().endswith('.npz')
