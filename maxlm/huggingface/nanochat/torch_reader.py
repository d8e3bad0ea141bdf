"""Reads the tensors of a file that `torch.save` wrote, without PyTorch.

The file is a ZIP archive (torch/serialization.py) with the entries `NAME/data.pkl`, a pickle of the names, shapes and
strides, and `NAME/data/K`, the uncompressed bytes of storage K.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from maxlm.errors import InputError, os_message
from maxlm.huggingface.nanochat.pickle_parser import Name, PersistentId, PickledCall, parse_pickle
from maxlm.storage.regular_files import open_regular

# The pickle has about 150 bytes per tensor.
MAX_PICKLE_BYTES = 2**21
# Maximum size of the list of the archive's entries, which has about 70 bytes per tensor.
MAX_DIRECTORY_BYTES = 2**22
# The product of many large sizes takes long.
_MAX_AXES, _MAX_SIZE = 8, 2**48
_REBUILD = 'torch._utils._rebuild_tensor_v2'
DTYPES: dict[str, Any] = {
    'torch.FloatStorage': np.dtype('<f4'),
    'torch.BFloat16Storage': np.dtype(ml_dtypes.bfloat16),
    'torch.HalfStorage': np.dtype('<f2'),
}
# Storages of other dtypes, which a message names.
_OTHERS = tuple(f'torch.{kind}Storage' for kind in ('Double', 'Long', 'Int', 'Short', 'Char', 'Byte', 'Bool'))
_AGAIN = 'download or copy the file again'
# Prefix of the names in a state dict of `torch.compile`.
COMPILED = '_orig_mod.'


class TorchTensors:
    """The tensors of one file, by name, without the prefix of compiled modules.

    Attributes:
        shapes: name → shape.
        dtypes: name → dtype.
    """

    def __init__(self, path: Path):
        """Reads the names and shapes, but no values.

        Raises:
            InputError: the file cannot be read, is no archive of `torch.save`, or does not contain a dict of contiguous
                tensors with storages of their own.
        """
        self._path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._entries: dict[str, str] = {}
        with _opened(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith('/data.pkl') and name.count('/') == 1]
            if len(pickles) != 1:
                raise InputError(f'{path}: has no data.pkl of torch.save; use a file that nanochat saved')
            folder = pickles[0].removesuffix('data.pkl')
            if (order := f'{folder}byteorder') in archive.namelist() and self._content(archive, order) != b'little':
                raise InputError(f'{path}: a big-endian machine wrote this file; save it on a little-endian machine')
            content = self._content(archive, pickles[0])
            values = parse_pickle(content, (_REBUILD, *DTYPES, *_OTHERS), str(path))
            if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
                raise InputError(f'{path}: contains no dict of named tensors; use model_NNNNNN.pt of nanochat')
            for name, value in values.items():
                self._add(name.removeprefix(COMPILED), value, folder, archive)
            stored = sum(archive.getinfo(entry).file_size for entry in self._entries.values())
            if stored > path.stat().st_size or len(set(self._entries.values())) < len(self._entries):
                raise InputError(f'{path}: tensors overlap in the file; {_AGAIN}')

    def path(self, name: str) -> Path:
        """Returns the path of the file that contains a tensor."""
        return self._path

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in float32.

        Raises:
            InputError: the file is damaged.
        """
        with _opened(self._path) as archive:
            content = self._content(archive, self._entries[name], is_small=False)
        values = np.frombuffer(content, self.dtypes[name])
        return values.astype(np.float32).reshape(self.shapes[name])

    def _content(self, archive: zipfile.ZipFile, entry: str, *, is_small: bool = True) -> bytes:
        info = archive.getinfo(entry)
        if info.compress_type != zipfile.ZIP_STORED or (is_small and info.file_size > MAX_PICKLE_BYTES):
            raise InputError(f'{self._path}: {entry} is compressed or too large; use a file that nanochat saved')
        try:
            return archive.read(info)
        # The library raises RuntimeError for encrypted files.
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError) as error:
            raise InputError(f'{self._path}: {entry} is damaged ({error}); {_AGAIN}') from error

    def _add(self, name: str, value: Any, folder: str, archive: zipfile.ZipFile) -> None:
        """Records a tensor after checking that it fills a storage.

        Views of a storage are refused, because a few bytes could be a tensor of any size.
        """
        where = f'{self._path}: tensor {name[:100]}'
        if name in self.shapes:
            raise InputError(f'{where} exists with and without the prefix {COMPILED}; remove one of the two')
        match value:
            case PickledCall(
                name=str(function),
                arguments=(
                    PersistentId(value=('storage', Name(text=str(kind)), str(key), str(), int(count))),
                    int(offset),
                    tuple(shape),
                    tuple(strides),
                    *_,
                ),
            ) if function == _REBUILD and _is_size(count) and _are_sizes(shape) and _are_sizes(strides):
                pass
            case _:
                raise InputError(f'{where} is no plain tensor; save the state dict of the model')
        if kind not in DTYPES:
            dtype = kind.removeprefix('torch.').removesuffix('Storage').lower()
            raise InputError(f'{where} has dtype {dtype}; must be float32, bfloat16 or float16')
        if offset or count != math.prod(shape) or strides != _contiguous(shape):
            raise InputError(f'{where} is a view of another tensor; save contiguous tensors')
        entry = f'{folder}data/{key}'
        if entry not in archive.NameToInfo:
            raise InputError(f'{where}: its storage {entry[:100]} is missing; {_AGAIN}')
        if (found := archive.getinfo(entry).file_size) != (size := count * DTYPES[kind].itemsize):
            raise InputError(f'{where}: its storage has {found:,} bytes instead of {size:,}; {_AGAIN}')
        self.shapes[name], self.dtypes[name], self._entries[name] = shape, DTYPES[kind], entry


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return len(values) <= _MAX_AXES and all(map(_is_size, values))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Yields the archive after checking the size of its list of entries, which the library reads completely."""
    try:
        with open_regular(path) as file:
            if _directory_size(file) > MAX_DIRECTORY_BYTES:
                raise zipfile.BadZipFile('too many entries')
            with zipfile.ZipFile(file) as archive:
                yield archive
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; choose a readable file') from error
    # The library raises NotImplementedError for archives of later versions of the format.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise InputError(f'{path}: is not a complete file of torch.save ({error}); {_AGAIN}') from error


def _directory_size(file: BinaryIO) -> int:
    """Returns the size of the central directory in bytes, from the end of an archive without a comment.

    The records are the last 22 bytes and, in an archive with 64-bit sizes, the 76 bytes before them (APPNOTE 4.3.14).
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read().rjust(98, b'\0')
    if tail[76:80] != b'PK\5\6':
        raise zipfile.BadZipFile('the end of the archive is missing')
    if tail[56:60] == b'PK\6\7':
        return int.from_bytes(tail[40:48], 'little')
    return int.from_bytes(tail[88:92], 'little')
