"""Reads JSONL, optionally compressed with gzip or Zstandard. Each line is a text, a conversation or a preference."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from maxlm.data.documents.document import Document, OnBad
from maxlm.data.documents.parse_record import entry_document, entry_format
from maxlm.data.documents.read_options import MAX_RECORD_BYTES, ReadOptions
from maxlm.data.formats.compression import decompressed, is_compressed
from maxlm.data.formats.input_file import InputFile
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path
from maxlm.storage.json_text import parse_json

# Block size for reads that only search for line ends.
CHUNK_BYTES = 2**20
UTF8_MARK = b'\xef\xbb\xbf'


def bounds(file: InputFile) -> Sequence[int]:
    """Returns the unit boundaries. Units are bytes; a line belongs to its first byte. Compressed files are one unit."""
    return () if is_compressed(file.name) else range(file.size + 1)


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """Yields the documents of the lines that start in bytes [start, stop); see `record_formats.Reader`.

    Names are `FILE:BYTE` with the offset of the line in the (decompressed) file, because it is known without reading
    the lines before it.
    """
    path = display_path(file.path)
    lines_before: int | None = 0 if start == 0 else None
    try:
        with contextlib.ExitStack() as stack:
            stored = stack.enter_context(filesystem.open_file(file.path))
            stream = decompressed(stored, file.name, max_window_bytes=options.max_window_bytes)
            offset = first_offset = _first_line(stream, start)
            number = 0
            while offset < stop and (line := stream.readline(options.max_record_bytes + 1)):
                number += 1
                is_whole = len(line) <= options.max_record_bytes or line.endswith(b'\n')
                content = line.removeprefix(UTF8_MARK) if offset == 0 else line
                if content.strip() or not is_whole:
                    try:
                        if not is_whole:
                            raise ValueError(f'the line is longer than {options.limit_text}; raise --max-record-mib')
                        entry = parse(content, options, offset + len(line) - len(content))
                        yield entry_document(f'{file.name}:{offset}', file.source, entry, options)
                    except ValueError as error:
                        if lines_before is None:
                            lines_before = _count_lines(file.path, first_offset)
                        line_number = lines_before + number
                        on_bad(f'{file.name}:{line_number}', f'{path}:{line_number}: {error}')
                offset += len(line) + (0 if is_whole else _skip_line(stream))
            if offset < min(stop, file.size) and not is_compressed(file.name):
                on_bad(file.name, f'{path}: ends at byte {offset} of {file.size}; it was truncated after it was listed')
    except StorageError as error:
        on_bad(file.name, str(error))
    except (EOFError, zlib.error, OSError) as error:
        on_bad(file.name, f'{path}: damaged or truncated ({error}); fetch or compress it again')


def parse(line: bytes, options: ReadOptions, offset: int) -> Any:
    """Returns the JSON value of a line that starts at byte `offset`. Raises ValueError if it is invalid."""
    try:
        return parse_json(line.decode('utf-8'))
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {offset + error.start} of the file is not UTF-8; save the file as UTF-8') from error
    except ValueError as error:
        descriptions = {'chat': 'with a conversation', 'preference': 'with a pair of answers or an answer with a label'}
        expected = descriptions.get(options.format, f'like {{"{options.text_key}": "…"}}')
        raise ValueError(f'not JSON ({error}); each line must be an object {expected}') from error


def first_format(file: InputFile, options: ReadOptions) -> str:
    """Returns the format of the first record of a file: `preference`, `chat` or `text`.

    A damaged file counts as `text`; reading it reports the damage.

    Raises:
        StorageError: the file does not exist, or the storage does not respond.
    """
    with filesystem.open_file(file.path) as content:
        try:
            stream = decompressed(content, file.name, max_window_bytes=options.max_window_bytes)
            lines = iter(lambda: stream.readline(options.max_record_bytes + 1), b'')
            stripped = (line.removeprefix(UTF8_MARK).strip() for line in lines)
            entry = parse(next(filter(None, stripped), b'null'), options, 0)
        except (ValueError, EOFError, zlib.error, OSError):
            return 'text'
    return entry_format(entry, options)


def _first_line(stream: BinaryIO, start: int) -> int:
    """Seeks to the first line that starts at byte `start` or later, and returns its offset."""
    if start == 0:
        return 0
    stream.seek(start - 1)
    return start - 1 + _skip_line(stream)


def _skip_line(stream: BinaryIO) -> int:
    """Reads to the end of the line and returns the number of bytes read."""
    size = 0
    # Read in blocks, because the line may be larger than memory.
    while part := stream.readline(CHUNK_BYTES):
        size += len(part)
        if part.endswith(b'\n'):
            break
    return size


def _count_lines(path: str, stop: int) -> int:
    """Returns the number of lines before byte `stop`, which must be the start of a line."""
    count = 0
    with filesystem.open_file(path) as file:
        while stop > 0 and (chunk := file.read(min(CHUNK_BYTES, stop))):
            count += chunk.count(b'\n')
            stop -= len(chunk)
    return count


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of each non-empty line of a JSONL file.

    The file is local or in a bucket, optionally compressed with gzip or Zstandard.

    Raises:
        InputError: the file cannot be read, or a line is not a JSON object. The message names the line.
    """
    name = display_path(path)
    try:
        with contextlib.ExitStack() as stack:
            stream = decompressed(stack.enter_context(filesystem.open_file(path)), path)
            lines = iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), b'')
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_RECORD_BYTES:
                    raise InputError(f'{name}:{number}: the line must have at most {MAX_RECORD_BYTES // 2**20} MiB')
                try:
                    entry = parse_json(line.decode('utf-8-sig')) if line.strip() else None
                except UnicodeDecodeError as error:
                    raise InputError(f'{name}:{number}: not UTF-8; save the file as UTF-8') from error
                except ValueError as error:
                    raise InputError(f'{name}:{number}: not JSON ({error}); each line must be an object') from error
                if line.strip() and not isinstance(entry, dict):
                    raise InputError(
                        f'{name}:{number}: must be an object with "prompt" or "messages", not {type(entry).__name__}'
                    )
                if entry is not None:
                    yield number, entry
    except (EOFError, zlib.error, OSError) as error:
        raise InputError(f'{name}: damaged or truncated ({error}); fetch or compress it again') from error
