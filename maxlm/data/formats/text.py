"""Reads text files, each of which is one document."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.compression import decompressed, is_compressed
from maxlm.data.formats.input_file import InputFile
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path

# Some editors start UTF-8 files with it; it is not part of the text.
BYTE_ORDER_MARK = '\ufeff'


def bounds(file: InputFile) -> Sequence[int]:
    """Returns no unit boundaries: text files are not split."""
    return ()


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the file as one document; see `record_formats.Reader`.

    A compressed file is decompressed up to the maximum record size; larger files are reported to `on_bad`.
    """
    path = display_path(file.path)
    try:
        if is_compressed(file.name):
            with filesystem.open_file(file.path) as stream:
                plain = decompressed(stream, file.name, max_window_bytes=options.max_window_bytes)
                content = plain.read(options.max_record_bytes + 1)
        else:
            content = filesystem.read_bytes(file.path)
    except StorageError as error:
        on_bad(file.name, str(error))
        return
    except (EOFError, zlib.error, OSError) as error:
        on_bad(file.name, f'{path}: damaged or truncated ({error}); fetch or compress it again')
        return
    if is_compressed(file.name) and len(content) > options.max_record_bytes:
        on_bad(file.name, f'{path}: longer than {options.limit_text}; raise --max-record-mib')
        return
    try:
        text = content.decode('utf-8')
    except UnicodeDecodeError as error:
        on_bad(file.name, f'{path}: byte {error.start} is not UTF-8; save the file as UTF-8')
        return
    yield Document(file.name, file.source, text.removeprefix(BYTE_ORDER_MARK))
