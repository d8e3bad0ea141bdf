"""Random access to token files: `.npy`, the members of `.npz`, and raw `.bin` with or without a header."""

from __future__ import annotations

import dataclasses
import io
import math
import tokenize
import warnings
import zipfile
from typing import BinaryIO

import numpy as np

RAW_DTYPES = ('uint16', 'uint32')
# Header of llm.c token files: 256 integers that start with a magic number, a version and the number of tokens
# (github.com/karpathy/llm.c, dev/data/data_common.py). Maps (magic number, version) to the token dtype.
HEADER_DTYPES = {(20240520, 1): 'uint16', (20240801, 7): 'uint32'}
HEADER_INTEGERS = 256
# Maximum length of headers that NumPy parses.
MAX_NPY_HEADER_BYTES = 10_000
# Bytes that are read at once to skip a part of a member of an archive.
MAX_SKIPPED_BYTES = 2**20


class TokenFileError(Exception):
    """Error in a token file. The message does not contain the file name."""


@dataclasses.dataclass
class TokenArray:
    """Array of integers in a file. Only the requested ranges are read.

    Attributes:
        file: open file.
        offset: byte offset of the first integer.
        dtype: dtype of the integers.
        shape: [tokens] or [documents, length].
    """

    file: BinaryIO
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Returns the number of integers."""
        return math.prod(self.shape)

    @property
    def has_rows(self) -> bool:
        """Returns True if each document is a separate row."""
        return len(self.shape) == 2

    @property
    def num_bytes(self) -> int:
        """Returns the size of all integers in bytes."""
        return self.length * self.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the integers [start, stop) in C order. Raises TokenFileError if the file ends before `stop`."""
        self._seek(self.offset + start * self.dtype.itemsize)
        content = self.file.read((stop - start) * self.dtype.itemsize)
        ids = np.frombuffer(content[: len(content) // self.dtype.itemsize * self.dtype.itemsize], self.dtype)
        if len(ids) < stop - start:
            raise TokenFileError(f'ends at token {start + len(ids)} of {self.length}; it was truncated')
        return ids

    def read_rest(self) -> None:
        """Reads the rest of the file, which checks the CRC of a member of an archive."""
        while self.file.read(MAX_SKIPPED_BYTES):
            pass

    def _seek(self, position: int) -> None:
        if isinstance(self.file, zipfile.ZipExtFile):
            # Members of an archive are read up to the position. Seeking forward in an uncompressed member would end the
            # check of its CRC, and early versions of Python 3.12 then continue at the position of another open member.
            while (skipped := position - self.file.tell()) > 0 and self.file.read(min(skipped, MAX_SKIPPED_BYTES)):
                pass
        self.file.seek(position)


@dataclasses.dataclass(frozen=True)
class NpyHeader:
    """Header of a `.npy` file: the shape, memory order and dtype of its array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype


def read_npy_header(file: BinaryIO) -> NpyHeader:
    """Returns the header of a `.npy` file, and leaves the file at the first value.

    Raises:
        TokenFileError: the file is not a valid `.npy` file.
    """
    try:
        # Version 3 is for non-ASCII field names; arrays of token ids have no fields.
        read_header, length_bytes = {
            (1, 0): (np.lib.format.read_array_header_1_0, 2),
            (2, 0): (np.lib.format.read_array_header_2_0, 4),
        }[np.lib.format.read_magic(file)]
        # NumPy reads the number of bytes stated in the header before it checks the number.
        start = file.read(length_bytes)
        length = min(int.from_bytes(start, 'little'), MAX_NPY_HEADER_BYTES + 1)
        with warnings.catch_warnings():
            # Headers written by Python 2 are also accepted.
            warnings.simplefilter('ignore', UserWarning)
            return NpyHeader(*read_header(io.BytesIO(start + file.read(length))))
    # NumPy tokenizes headers written by Python 2 and evaluates all headers, which raises many exception types.
    except (ValueError, KeyError, SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError) as error:
        reason = ' '.join(str(error).split())[:200]
        raise TokenFileError(f'not a .npy array ({reason}); save it with numpy.save') from error


def open_npy(file: BinaryIO, size: int, *, kinds: str = 'iu') -> TokenArray:
    """Returns the array of a `.npy` file of `size` bytes. Never unpickles.

    Args:
        file: the open file.
        size: size of the file in bytes.
        kinds: accepted kinds of NumPy dtypes; the default is integers.

    Raises:
        TokenFileError: the file is not a valid `.npy` file; the array contains other values than `kinds`; it is not
            one- or two-dimensional; or the size of the file differs from the size in the header.
    """
    header = read_npy_header(file)
    shape, dtype = header.shape, header.dtype
    if dtype.hasobject:
        raise TokenFileError('contains Python objects, which are never unpickled; save an array of integers')
    if dtype.kind not in kinds:
        raise TokenFileError(f'contains {dtype}; token ids must be integers (uint16, uint32, int32, int64)')
    if len(shape) not in (1, 2):
        raise TokenFileError(f'has {len(shape)} dimensions; give [tokens] or [documents, length]')
    if min(shape) < 0:
        raise TokenFileError(f'has the shape {shape}; save it with numpy.save')
    if header.fortran_order and len(shape) == 2 and min(shape) > 1:
        raise TokenFileError('is stored in column-major order; save numpy.ascontiguousarray(array)')
    array = TokenArray(file, file.tell(), dtype, shape)
    _refuse_size(size, array)
    return array


def open_raw(file: BinaryIO, size: int, token_dtype: str) -> TokenArray:
    """Returns the tokens of a raw little-endian file of `size` bytes, with the header of llm.c or of `token_dtype`.

    Raises:
        TokenFileError: the dtype is unknown, or the size of the file does not match it.
    """
    start = file.read(4 * HEADER_INTEGERS)
    header = np.frombuffer(start, '<i4') if len(start) == 4 * HEADER_INTEGERS else np.zeros(1, '<i4')
    if int(header[0]) in {magic for magic, _ in HEADER_DTYPES}:
        known = HEADER_DTYPES.get((int(header[0]), int(header[1])))
        if known is None:
            raise TokenFileError(f'has the unsupported header version {header[1]}')
        if token_dtype not in ('', known):
            raise TokenFileError(f'the dtype in its header is {known}, not --token-dtype={token_dtype}')
        array = TokenArray(file, 4 * HEADER_INTEGERS, np.dtype(known).newbyteorder('<'), (int(header[2]),))
        _refuse_size(size, array)
        return array
    if token_dtype not in RAW_DTYPES:
        raise TokenFileError('does not specify its dtype; add --token-dtype=uint16 or --token-dtype=uint32')
    dtype = np.dtype(token_dtype).newbyteorder('<')
    if size % dtype.itemsize:
        raise TokenFileError(f'has {size} bytes, not a multiple of the size of {token_dtype}; it was truncated')
    return TokenArray(file, 0, dtype, (size // dtype.itemsize,))


def _refuse_size(size: int, array: TokenArray) -> None:
    expected = array.offset + array.num_bytes
    if size != expected:
        raise TokenFileError(f'has {size} bytes, not the {expected} of its header; it was truncated or extended')
