"""Sizes of Parquet pages, read from their headers before a page is decompressed.

The footer has the sizes of column chunks only, and nothing makes them true. A page is decompressed as a whole, to at
most 2 GiB, so the header of each page that a reader is going to decode is looked at first. Format:
github.com/apache/parquet-format, `PageHeader` in the compact protocol of Thrift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

# Writers end pages at 1 MiB by default; DuckDB's have up to 100 MB.
MAX_PAGE_BYTES = 2**27
# The footer is parsed as a whole, to several times its size.
MAX_FOOTER_BYTES = 2**26
# Of a page header.
_UNCOMPRESSED, _COMPRESSED = 2, 3


def check_footer(file: BinaryIO) -> None:
    """Raises OSError if the footer of a file is larger than any that a writer makes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    footer = int.from_bytes(file.read(4), 'little')
    file.seek(0)
    if min(footer, size) > MAX_FOOTER_BYTES:
        raise OSError(f'a footer of {footer:,} bytes, more than {MAX_FOOTER_BYTES:,}')


def largest_pages(file: BinaryIO, group: Any, columns: Sequence[str] | None, limit: int) -> int:
    """Returns how many bytes the largest page of each column of a row group has, summed over the columns.

    Args:
        file: the Parquet file.
        group: `RowGroupMetaData`.
        columns: names of top-level columns; None = all.
        limit: largest page that may be decompressed, in bytes.

    Raises:
        ValueError: a page is larger than the limit.
        OSError: a header is damaged.
    """
    total = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        name = chunk.path_in_schema
        if columns is not None and not any(name == column or name.startswith(f'{column}.') for column in columns):
            continue
        largest = max(_page_sizes(file, chunk), default=0)
        if largest > limit:
            raise ValueError(
                f'a page of the column {name!r} has {largest:,} bytes, more than {limit:,}, the limit for a page; '
                f'--max_record_mib raises it'
            )
        total += largest
    return total


def _page_sizes(file: BinaryIO, chunk: Any) -> Iterator[int]:
    """Yields the uncompressed size of each page of a column chunk."""
    place = chunk.data_page_offset
    # As in Arrow.
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < place:
        place = chunk.dictionary_page_offset
    stop = place + chunk.total_compressed_size
    while place < stop:
        file.seek(place)
        header = _read_struct(file)
        compressed, uncompressed = header.get(_COMPRESSED, -1), header.get(_UNCOMPRESSED, -1)
        if min(compressed, uncompressed) < 0:
            raise OSError('the header of a page is damaged')
        yield uncompressed
        place = file.tell() + compressed


def _read_struct(file: BinaryIO, depth: int = 3) -> dict[int, int]:
    """Reads a struct and returns its integers by field number; skips all else."""
    found: dict[int, int] = {}
    number = 0
    while byte := _read_byte(file):
        delta, kind = byte >> 4, byte & 15
        number = number + delta if delta else _signed(_read_varint(file))
        if kind in (4, 5, 6):
            found[number] = _signed(_read_varint(file))
        elif kind == 8:
            # A binary value: its length comes first.
            file.seek(min(_read_varint(file), 2**31), os.SEEK_CUR)
        elif kind in (3, 7):
            file.seek(1 if kind == 3 else 8, os.SEEK_CUR)
        elif kind == 12 and depth:
            _read_struct(file, depth - 1)
        # Booleans are a part of the type; page headers have no lists and maps.
        elif kind not in (1, 2):
            raise OSError('the header of a page is damaged')
    return found


def _read_varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _read_byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise OSError('the header of a page is damaged')


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)


def _read_byte(file: BinaryIO) -> int:
    byte = file.read(1)
    if not byte:
        raise OSError('the file ends in the header of a page')
    return byte[0]
