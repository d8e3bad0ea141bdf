"""Sizes of Parquet pages, read from their headers before decompression.

The footer contains only the sizes of column chunks, and they can be wrong. A page is decompressed as a unit, to at
most 2 GiB, so the header of each page is checked before it is decoded. Chunk offsets are also read here, because
PyArrow aborts the process on access to the chunk offsets of some damaged files.

Format: github.com/apache/parquet-format, `FileMetaData` and `PageHeader` in the compact protocol of Thrift.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

# Writers end pages at 1 MiB by default; pages of DuckDB have up to 100 MB.
MAX_PAGE_BYTES = 2**27
# The parsed footer takes several times its size in memory.
MAX_FOOTER_BYTES = 2**26
# Maximum number of structs and integers in a footer. Each can take one byte in the file and a hundred in memory.
MAX_VALUES = 2**22
# Fields of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData and PageHeader.
_ROW_GROUPS, _COLUMNS, _CHUNK = 4, 1, 3
_CHUNK_BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11
_UNCOMPRESSED, _COMPRESSED = 2, 3


def check_footer(file: BinaryIO) -> None:
    """Raises OSError if the footer of a file is larger than the footers of all known writers."""
    footer, size = _footer_bytes(file)
    file.seek(0)
    if min(footer, size) > MAX_FOOTER_BYTES:
        raise OSError(f'the footer has {footer:,} bytes, more than the limit of {MAX_FOOTER_BYTES:,}')


def column_chunks(file: BinaryIO) -> list[list[range]]:
    """Returns the byte range of each column of each row group in a file with a checked footer.

    Raises:
        OSError: the footer is damaged.
    """
    footer, size = _footer_bytes(file)
    file.seek(max(0, size - 8 - footer))
    metadata = _Thrift(io.BytesIO(file.read(footer))).read_struct()
    try:
        return [[_bytes_of(chunk[_CHUNK]) for chunk in group[_COLUMNS]] for group in metadata[_ROW_GROUPS]]
    except (KeyError, TypeError) as error:
        raise OSError('the footer is damaged') from error


def largest_pages(
    file: BinaryIO, chunks: Sequence[range], names: Sequence[str], columns: Sequence[str] | None, limit: int
) -> int:
    """Returns the size in bytes of the largest page of each column of a row group, summed over the columns.

    Args:
        file: the Parquet file.
        chunks: byte ranges of the row group's columns, from `column_chunks`.
        names: names of the row group's columns. Nested columns have the prefix `TOP_LEVEL_COLUMN.`.
        columns: names of the top-level columns to include; None = all.
        limit: maximum size in bytes of a page that may be decompressed.

    Raises:
        ValueError: a page is larger than the limit.
        OSError: a header is damaged.
    """
    if len(chunks) != len(names):
        raise OSError('the footer is damaged')
    total = 0
    for name, chunk in zip(names, chunks, strict=True):
        if columns is not None and not any(name == column or name.startswith(f'{column}.') for column in columns):
            continue
        largest = max(_page_sizes(file, chunk), default=0)
        if largest > limit:
            raise ValueError(
                f'a page of the column {name!r} has {largest:,} bytes, more than the limit of {limit:,}; '
                f'raise --max-record-mib'
            )
        total += largest
    return total


def _footer_bytes(file: BinaryIO) -> tuple[int, int]:
    """Returns the stated size of the footer, and the size of the file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    return int.from_bytes(file.read(4), 'little'), size


def _bytes_of(chunk: dict[int, Any]) -> range:
    start, dictionary = chunk[_DATA_PAGE], chunk.get(_DICTIONARY_PAGE, 0)
    # As in Arrow, the dictionary page comes first if its offset is valid.
    start = dictionary if 0 < dictionary < start else start
    return range(start, start + chunk[_CHUNK_BYTES])


def _page_sizes(file: BinaryIO, chunk: range) -> Iterator[int]:
    """Yields the uncompressed size of each page of a column chunk."""
    place = chunk.start
    while place in chunk:
        file.seek(place)
        header = _Thrift(file).read_struct()
        compressed, uncompressed = header.get(_COMPRESSED, -1), header.get(_UNCOMPRESSED, -1)
        if not (isinstance(compressed, int) and isinstance(uncompressed, int)) or min(compressed, uncompressed) < 0:
            raise OSError('the header of a page is damaged')
        yield uncompressed
        place = file.tell() + compressed


class _Thrift:
    """Reads structs of integers, lists and structs, and skips other types. Raises OSError if the bytes are damaged."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._values_left = MAX_VALUES

    def read_struct(self, depth: int = 8) -> dict[int, Any]:
        """Returns the values of a struct by field number."""
        found: dict[int, Any] = {}
        number = 0
        while byte := self._read_byte():
            delta, kind = byte >> 4, byte & 15
            number = number + delta if delta else _signed(self._read_varint())
            # The type of a boolean field includes its value, which is not needed.
            if kind not in (1, 2):
                found[number] = self._read_value(kind, depth)
        return found

    def _read_value(self, kind: int, depth: int) -> Any:
        self._values_left -= 1
        if not depth or self._values_left < 0:
            raise OSError('damaged, or contains more values than any writer produces')
        if kind in (4, 5, 6):
            return _signed(self._read_varint())
        if kind == 12:
            return self.read_struct(depth - 1)
        if kind in (9, 10):
            byte = self._read_byte()
            length = byte >> 4 if byte >> 4 < 15 else self._read_varint()
            return [self._read_value(byte & 15, depth - 1) for _ in range(length)]
        # In lists, a boolean is one byte. Strings and binary values start with their length.
        sizes = {1: 1, 2: 1, 3: 1, 7: 8}
        if kind not in sizes and kind != 8:
            raise OSError('damaged')
        self._file.seek(sizes[kind] if kind in sizes else min(self._read_varint(), 2**31), os.SEEK_CUR)
        return None

    def _read_varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise OSError('damaged')

    def _read_byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise OSError('truncated')
        return byte[0]


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)
