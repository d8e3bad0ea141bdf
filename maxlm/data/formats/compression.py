"""Decompression streams that raise an error if the compressed file is truncated."""

from __future__ import annotations

import gzip
import io
from typing import Any, BinaryIO, cast

from maxlm.data.documents.read_options import MAX_WINDOW_BYTES

# Number of compressed bytes per call. A Zstandard block can expand by a factor of 32768, here to 64 MiB.
INPUT_BYTES = 2**11
# Files may decode to this many times their size, or to this many bytes if that is more. Gzip cannot exceed a factor of
# 1032.
MAX_EXPANSION, MIN_LIMIT_BYTES = 2000, 2**28
COMPRESSED_SUFFIXES = ('.gz', '.zst')


def is_compressed(name: str) -> bool:
    """Returns True if the suffix of a file name is a compression supported by `decompressed`."""
    return name.lower().endswith(COMPRESSED_SUFFIXES)


def decompressed(file: BinaryIO, name: str, *, max_window_bytes: int = MAX_WINDOW_BYTES) -> BinaryIO:
    """Returns a stream of the decompressed content of an open file, selected by the suffix of `name`.

    Without a compression suffix, the result is `file` itself. Reading the stream raises EOFError if the file is
    truncated. It raises OSError or zlib.error if the file is otherwise damaged. It also raises OSError if the Zstandard
    window, which the decompressor keeps in memory, is larger than `max_window_bytes`. The same holds for content that
    is much larger than the file, such as billions of empty lines.
    """
    if name.lower().endswith('.gz'):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if name.lower().endswith('.zst'):
        return io.BufferedReader(_ZstandardStream(file, max_window_bytes), 2**20)
    return file


class _ZstandardStream(io.RawIOBase):
    """Zstandard stream that detects truncated files, unlike the stream of the zstandard package."""

    def __init__(self, file: BinaryIO, max_window_bytes: int):
        import zstandard  # imported lazily, because few inputs are compressed

        self._file = file
        self._error = zstandard.ZstdError
        self._max_window_bytes = max_window_bytes
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=max_window_bytes)
        # Decompressor of the current frame; None between two frames.
        self._frame: Any = None
        self._input = b''
        self._output = memoryview(b'')
        # Bytes that may still be decoded.
        self._left = MIN_LIMIT_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(INPUT_BYTES)
                self._left += MAX_EXPANSION * len(self._input)
            if not self._input:
                if self._frame is not None:
                    raise EOFError('the compressed file ends in the middle of a frame')
                return 0
            self._decompress()
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._error as error:
            if 'too much memory' in str(error):
                limit = f'{self._max_window_bytes / 2**20:g} MiB'
                raise OSError(f'the Zstandard window is larger than {limit}; raise --max-record-mib') from error
            raise OSError(str(error)) from error
        self._left -= len(self._output)
        if self._left < 0:
            raise OSError(f'the content has more than {MAX_EXPANSION:,} times the size of the file')
        self._input = b''
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
