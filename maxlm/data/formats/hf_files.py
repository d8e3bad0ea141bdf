"""Opens the files of streamed datasets with the same limits as local files.

The package `datasets` reads lines of any length. It opens all files with one function, which `limit_files` replaces.
Parquet files are decoded by `maxlm.data.formats.parquet` instead of `datasets`; `parquet_file` returns their paths.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.parquet_pages import check_footer
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import display_path
from maxlm.storage.regular_files import open_regular

TEXT_SUFFIXES = ('.json', '.jsonl', '.ndjson', '.csv', '.tsv', '.txt')


def limit_files(datasets: Any, options: ReadOptions) -> None:
    """Patches `datasets` so that it opens the files of streamed datasets with the limits of `options`."""
    streaming = datasets.streaming
    if not isinstance(streaming.xopen, _Opener):
        streaming.xopen = datasets.utils.file_utils.xopen = _Opener(streaming.xopen)
        for name, module in tuple(sys.modules.items()):
            if name.startswith('datasets.packaged_modules.') and hasattr(module, '_patched_for_streaming'):
                # Other callers, such as lm-eval, have already patched this module. The next use patches it with the new
                # function.
                module._patched_for_streaming = False  # type: ignore[attr-defined]
    streaming.xopen.options = options


def parquet_file(dataset: Any, shard: int) -> str:
    """Returns the path or URL of a shard of a streamed dataset, or '' if it is not a Parquet file."""
    files = getattr(getattr(dataset, '_ex_iterable', None), 'kwargs', {}).get('files')
    if not isinstance(files, list) or len(files) != dataset.num_shards:
        return ''
    path = str(files[shard])
    return path if path.endswith('.parquet') and '::' not in path else ''


class _Opener:
    """Replacement of `xopen` in `datasets` that enforces limits."""

    options = ReadOptions()

    def __init__(self, xopen: Callable[..., Any]):
        self._xopen = xopen

    def __call__(self, file: Any, mode: str = 'r', *, download_config: Any = None, **text_options: Any) -> Any:
        path = str(file)
        name = path.partition('::')[0].lower()
        if '://' in path:
            opened: Any = self._xopen(file, 'rb', download_config=download_config)
        else:
            opened = open_regular(path)
        if name.endswith(TEXT_SUFFIXES):
            opened = io.BufferedReader(_Lines(opened, path, self.options), 2**20)
        elif name.endswith('.parquet'):
            check_footer(opened)
        return opened if 'b' in mode else io.TextIOWrapper(opened, **text_options)


class _Lines(io.RawIOBase):
    """Text file. Reading raises StorageError if a line, or a file that is read completely, is too long."""

    def __init__(self, file: BinaryIO, path: str, options: ReadOptions):
        self._file = file
        self._path = path
        self._options = options
        self._since_line_end = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        end = content.rfind(b'\n')
        self._since_line_end = len(content) - end - 1 if end >= 0 else self._since_line_end + len(content)
        self._check(self._since_line_end, 'a line is')
        return len(content)

    def readall(self) -> bytes:
        blocks, size = [], 0
        while block := self.read(2**20):
            size += len(block)
            self._check(size, 'a file without lines is')
            blocks.append(block)
        return b''.join(blocks)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _check(self, size: int, what: str) -> None:
        if size > self._options.max_record_bytes:
            raise StorageError(
                f'{display_path(self._path)}: {what} longer than {self._options.limit_text}; raise --max-record-mib'
            )
