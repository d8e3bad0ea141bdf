"""Reads Parquet files, in which each row is a document."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.field_names import field_value, nested_names
from maxlm.data.documents.parse_record import columns_format
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.compression import MAX_EXPANSION, MIN_LIMIT_BYTES
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.parquet_pages import MAX_PAGE_BYTES, check_footer, column_chunks, largest_pages
from maxlm.data.formats.rows import column_fault, record_fields, row_document
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path

# Number of rows decoded together. It is small because a row may contain a book.
BATCH_ROWS = 128
# Memory limit of these rows. A dictionary page of D bytes can give each row a text of almost D bytes.
BATCH_BYTES = 2**28
# Decoded size of a row without text.
ROW_BYTES = 256
# Read buffer size. Without a buffer, PyArrow first reads the entire row group.
BUFFER_BYTES = 2**20


def bounds(file: InputFile) -> Sequence[int]:
    """Returns the unit boundaries. Units are row groups, with file bytes in proportion to their uncompressed sizes."""
    import pyarrow  # slow to import

    try:
        with filesystem.open_file(file.path) as content:
            metadata = _open(content).metadata
            # Use only row-group metadata: PyArrow aborts the process on access to a damaged column of a row group.
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError):
        return ()
    if min(sizes, default=0) < 0 or not any(sizes):
        return ()
    return [file.size * end // sum(sizes) for end in itertools.accumulate(sizes, initial=0)]


def first_format(file: InputFile, options: ReadOptions) -> str:
    """Returns the format detected from the columns: `preference`, `chat` or `text`; `text` if the file is damaged."""
    import pyarrow  # slow to import

    with filesystem.open_file(file.path) as content:
        try:
            schema = _open(content).schema_arrow
            return columns_format([*schema.names, *nested_columns(schema)], options)
        except (pyarrow.ArrowException, OSError):
            return 'text'


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the documents of row groups [start, stop); see `record_formats.Reader`.

    Names are `FILE:ROW`. Only the columns with the text and `metadata_keys` are read, or with the fields of
    conversations and preferences. Rows without text (null) are skipped.
    """
    import pyarrow  # slow to import

    path = display_path(file.path)
    try:
        with filesystem.open_file(file.path) as content:
            try:
                parquet = _open(content)
            except (pyarrow.ArrowException, OSError) as error:
                on_bad(file.name, f'{path}: not a readable Parquet file ({_line(error)}); fetch it again')
                return
            if fault := _column_fault(parquet.schema_arrow, options):
                on_bad(file.name, f'{path}: {fault}')
                return
            limit = _SizeLimit(file)
            chunks = functools.cache(lambda: column_chunks(content))
            row = sum(parquet.metadata.row_group(i).num_rows for i in range(min(start, parquet.num_row_groups)))
            for group in range(start, min(stop, parquet.num_row_groups)):
                first_row = row
                row += parquet.metadata.row_group(group).num_rows
                if row == first_row:
                    # Writers of many partitions leave empty files, whose row group has no pages.
                    continue
                try:
                    rows = _batch_rows(content, parquet, group, chunks, file.path, options)
                    yield from _read_group(parquet, group, rows, first_row, file, options, on_bad, limit)
                except (pyarrow.ArrowException, OSError) as error:
                    on_bad(
                        f'{file.name}:{first_row}',
                        f'{path}: the row group of rows {first_row} to {row - 1} is damaged ({_line(error)}); '
                        f'fetch the file again',
                    )
                except ValueError as error:
                    on_bad(
                        f'{file.name}:{first_row}',
                        f'{path}: the row group of rows {first_row} to {row - 1}: {error}',
                    )
    except StorageError as error:
        on_bad(file.name, str(error))


class _SizeLimit:
    """Limit of the decoded size of a file.

    A dictionary and the run length of its indices can describe terabytes of text in a kilobyte.
    """

    def __init__(self, file: InputFile):
        self._left = self._limit = max(MIN_LIMIT_BYTES, MAX_EXPANSION * file.size)
        self._size = file.size

    def add(self, size: int) -> None:
        """Raises ValueError if more than the limit was decoded."""
        self._left -= size
        if self._left < 0:
            raise ValueError(
                f'the file of {self._size:,} bytes contains more than {self._limit:,} bytes of text, the limit; '
                f'rewrite it without repeated rows, or remove it'
            )


def _batch_rows(
    content: BinaryIO,
    parquet: Any,
    group: int,
    chunks: Callable[[], list[list[range]]],
    path: str,
    options: ReadOptions,
) -> int:
    """Returns the number of rows of a row group to decode together.

    Raises:
        ValueError: a page is too large to be decompressed.
        OSError: the header of a page is damaged.
    """
    columns = record_fields(parquet.schema_arrow.names, options)
    metadata = parquet.metadata.row_group(group)
    # Do not read small groups in a bucket twice: with a correct footer, no page is larger than its group.
    if filesystem.is_url(path) and metadata.total_byte_size <= BATCH_BYTES:
        largest = metadata.total_byte_size
    else:
        names = [parquet.schema.column(index).path for index in range(len(parquet.schema))]
        limit = max(MAX_PAGE_BYTES, options.max_record_bytes)
        largest = largest_pages(content, chunks()[group], names, columns, limit)
    return min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, largest)))


def _read_group(
    parquet: Any,
    group: int,
    batch_rows: int,
    row: int,
    file: InputFile,
    options: ReadOptions,
    on_bad: OnBad,
    limit: _SizeLimit,
) -> Iterator[Document]:
    columns = record_fields(parquet.schema_arrow.names, options)
    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=columns):
        arrays = {key: batch.column(key) for key in columns}
        limit.add(batch.nbytes + ROW_BYTES * batch.num_rows)
        for i in range(batch.num_rows):
            # Convert values one at a time, so that only values that are not UTF-8 are rejected.
            try:
                values = {key: array[i].as_py() for key, array in arrays.items()}
            except UnicodeDecodeError as error:
                place = f'byte {error.start} of a text is not UTF-8'
                on_bad(f'{file.name}:{row + i}', f'{display_path(file.path)}: row {row + i}: {place}')
                continue
            # A batch contains a text of a dictionary once.
            limit.add(sum(len(values[key] or '') for key, array in arrays.items() if hasattr(array, 'dictionary')))
            yield from row_document(file, str(row + i), values, options, on_bad)
        row += batch.num_rows


def _open(content: BinaryIO) -> Any:
    """Opens a file. Raises ArrowException or OSError if it is damaged."""
    import pyarrow.parquet  # slow to import

    try:
        check_footer(content)
        return pyarrow.parquet.ParquetFile(content, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except UnicodeDecodeError as error:
        # PyArrow decodes column names without validation.
        raise pyarrow.ArrowInvalid('a column name is not UTF-8') from error


def nested_columns(schema: Any) -> list[str]:
    """Returns the names `a.b` of the fields of struct columns."""
    return nested_names({field.name: _fields_of(field.type) for field in schema})


def _fields_of(kind: Any) -> Any:
    """Returns the types of the fields of a struct by name, or the type itself."""
    import pyarrow.types as is_type  # slow to import

    if not is_type.is_struct(kind):
        return kind
    return {kind.field(i).name: _fields_of(kind.field(i).type) for i in range(kind.num_fields)}


def _column_fault(schema: Any, options: ReadOptions) -> str:
    """Returns an error text if the requested columns are missing or have a wrong type, else ''."""
    import pyarrow.types as is_type  # slow to import

    if fault := column_fault(schema.names, options, nested_columns(schema)):
        return fault
    columns = record_fields(schema.names, options)
    if repeated := [name for name in columns if schema.names.count(name) > 1]:
        return f'{schema.names.count(repeated[0])} columns are named {repeated[0]!r}; rename or remove all but one'
    if options.format != 'text':
        return ''
    kind = field_value({field.name: _fields_of(field.type) for field in schema}, options.text_key)
    # Extension types such as `arrow.json` are stored as another type.
    kind = getattr(kind, 'storage_type', kind)
    kind = kind.value_type if not isinstance(kind, dict) and is_type.is_dictionary(kind) else kind
    texts = (
        *(is_type.is_string, is_type.is_large_string, is_type.is_string_view, is_type.is_null),
        *(is_type.is_binary, is_type.is_large_binary, is_type.is_binary_view),
    )
    if isinstance(kind, dict):
        kind = f'a struct of {", ".join(kind)}'
    elif any(is_text(kind) for is_text in texts):
        return ''
    return f'the column {options.text_key!r} contains {kind}, not text; set --text-field to the text column'


def _line(error: Exception) -> str:
    return ' '.join(str(error).split())
