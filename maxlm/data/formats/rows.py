"""Converts rows of Parquet files and datasets to documents, with checks of columns and values."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.field_names import field_value, list_fields, top_field
from maxlm.data.documents.null_fields import present_fields
from maxlm.data.documents.parse_record import RECORD_FIELDS, entry_document
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.input_file import InputFile
from maxlm.storage.errors import classify_error
from maxlm.storage.filesystem import display_path


def row_document(
    file: InputFile, place: str, row: Mapping[str, Any], options: ReadOptions, on_bad: OnBad
) -> Iterator[Document]:
    """Yields the document of a row, named `FILE:PLACE`. Rows without text (None) or with invalid text yield nothing."""
    name = f'{file.name}:{place}'
    try:
        if options.format != 'text':
            entry = present_fields(plain(dict(row)))
            if not record_fields(list(entry), options):
                return
            document = entry_document(name, file.source, entry, options)
            _refuse_long(document.text, options)
            yield document
            return
        text = text_of(field_value(row, options.text_key))
        _refuse_long(text, options)
    except ValueError as error:
        on_bad(name, f'{display_path(file.path)}: row {place}: {error}')
        return
    metadata = {key: plain(field_value(row, key)) for key in options.metadata_keys}
    yield Document(name, file.source, text, metadata=metadata)


def column_fault(columns: Sequence[str], options: ReadOptions, nested: Sequence[str] = ()) -> str:
    """Returns an error text if a requested column is missing, else ''. `nested` are the names of nested fields."""
    names = dict.fromkeys((*columns, *nested), '')
    if options.format != 'text':
        needed = record_fields(columns, dataclasses.replace(options, metadata_keys=()))
        if needed and (not options.messages_field or options.messages_field in names or options.text_key in names):
            return ''
        missing = f'no column {options.messages_field!r}' if options.messages_field else 'no conversation column'
        return f'{missing}; {list_fields(names)}; set --messages-field to the column'
    for key in (options.text_key, *options.metadata_keys):
        if key not in names:
            option = '--text-field' if key == options.text_key else '--metadata-fields'
            return f'no column {key!r}; {list_fields(names)}; set {option} to the column'
    return ''


def record_fields(columns: Sequence[str], options: ReadOptions) -> list[str]:
    """Returns the columns of a row to read. Nested fields need the column that contains them."""
    if options.format == 'text':
        return list(dict.fromkeys(top_field(key, columns) for key in (options.text_key, *options.metadata_keys)))
    needed = {options.text_key, options.messages_field, *RECORD_FIELDS, *options.metadata_keys}
    needed = {top_field(key, columns) for key in needed}
    return [column for column in columns if column in needed]


def checked_rows(rows: Iterable[Any], path: str) -> Iterator[Any]:
    """Yields `rows`. Converts exceptions raised during iteration to a StorageError that names `path`."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        # Dataset readers raise the exceptions of all libraries that they use.
        except Exception as error:
            raise classify_error(path, error) from error
        yield row


def text_of(value: Any) -> str:
    """Returns a value as text, '' for None. Raises ValueError with the reason if the value is not text."""
    if value is None:
        return ''
    try:
        if isinstance(value, bytes):
            return value.decode('utf-8')
        if isinstance(value, str):
            # Strings with unpaired surrogates cannot be encoded.
            value.encode()
            return value
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {error.start} of the text is not UTF-8; convert the column to UTF-8') from error
    except UnicodeEncodeError as error:
        raise ValueError('contains an unpaired surrogate, which is not valid text; remove it') from error
    raise ValueError(f'contains {type(value).__name__}, not text; set --text-field to the text column')


def _refuse_long(text: str, options: ReadOptions) -> None:
    if len(text) > options.max_record_bytes:
        raise ValueError(f'the text is longer than {options.limit_text}; raise --max-record-mib')


def plain(value: Any) -> Any:
    """Converts a column value to a JSON value."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode('utf-8', errors='replace')
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    # NumPy scalars and arrays convert themselves to Python values.
    if hasattr(value, 'tolist'):
        return plain(value.tolist())
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
