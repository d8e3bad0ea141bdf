"""Text files: each is one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maxlm.data import storage
from maxlm.data.documents import Document, OnBad
from maxlm.data.inputs import InputFile
from maxlm.data.readers.options import ReadOptions
from maxlm.data.storage import StorageError, shown

# Some editors mark UTF-8 with it; it is not text.
BYTE_ORDER_MARK = '\ufeff'


def bounds(file: InputFile) -> Sequence[int]:
    """A document is not cut."""
    return ()


def read(file: InputFile, start: int, stop: int, options: ReadOptions, on_bad: OnBad) -> Iterator[Document]:
    """The file as a document. See `formats.Reader`."""
    try:
        content = storage.read_bytes(file.path)
    except StorageError as error:
        on_bad(file.name, str(error))
        return
    try:
        text = content.decode('utf-8')
    except UnicodeDecodeError as error:
        on_bad(file.name, f'{shown(file.path)}: byte {error.start} is not UTF-8; save the file as UTF-8')
        return
    yield Document(file.name, file.source, text.removeprefix(BYTE_ORDER_MARK))
