"""Reads the metadata and the tensor table of GGUF files.

Format: `docs/gguf.md` of ggml, versions 2 and 3. The reader of the package gguf does not check counts against the size
of the file, so a damaged count keeps it busy without end. It also needs seconds for the tokens of a large vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.errors import InputError, os_message
from maxlm.huggingface.gguf.library import load_gguf

SUFFIX = '.gguf'
_MAGIC, _VERSIONS, _MAX_DIMS = b'GGUF', (2, 3), 4
# Types of values by number: scalars of struct, then text and lists.
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_FLOAT32, _TEXT, _LIST = 6, 8, 9
_MAX_DEPTH = 4
_PART = re.compile(r'(.+)-(\d{5})-of-(\d{5})\.gguf')


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        path: file.
        shape: outermost axis first.
        kind: value of gguf's `GGMLQuantizationType`.
        offset, size: position of its bytes in the file.
    """

    path: Path
    shape: tuple[int, ...]
    kind: Any
    offset: int
    size: int


class GgufFiles:
    """The metadata and tensors of a model in one GGUF file, or in all parts of a split one.

    Attributes:
        source: path of the first file.
        metadata: values by key. Float32 values are the shortest decimal numbers with the same float32 value.
        tensors: tensors by name.
    """

    def __init__(self, path: Path):
        """Reads the headers.

        Raises:
            InputError: a file is missing, damaged, or of another version.
        """
        paths = _parts(path)
        self.source = paths[0]
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for number, part in enumerate(paths):
            metadata, tensors = _read_header(part)
            if metadata.get('split.count', 1) not in (len(paths), 1) or metadata.get('split.no', number) != number:
                raise InputError(
                    f'{part}: is part {metadata.get("split.no")} of {metadata.get("split.count")}, but its name says '
                    f'{number} of {len(paths)}; use the name under which it was published'
                )
            self.metadata = {**metadata, **self.metadata}
            for name in tensors:
                if name in self.tensors:
                    raise InputError(f'{part}: tensor {name:.100} is also in {self.tensors[name].path}; remove one')
            self.tensors |= tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def path(self, name: str) -> Path:
        """Returns the file of a tensor."""
        return self.tensors[name].path

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, dequantized to float32.

        Raises:
            InputError: its type is not supported, or the file cannot be read.
        """
        gguf, tensor = load_gguf(), self.tensors[name]
        values, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        rows = (*tensor.shape[:-1], tensor.shape[-1] // values * size)
        try:
            stored = np.memmap(tensor.path, np.uint8, 'r', tensor.offset, rows)
            found: np.ndarray = gguf.quants.dequantize(stored, tensor.kind)
        except NotImplementedError as error:
            raise InputError(
                f'{tensor.path}: tensor {name} has the type {tensor.kind.name}, which the package gguf cannot '
                'dequantize; use a file with another quantization'
            ) from error
        except (OSError, ValueError) as error:
            raise InputError(f'{tensor.path}: tensor {name} cannot be read: {error}; download it again') from error
        return np.asarray(found, np.float32).reshape(tensor.shape)


def _parts(path: Path) -> list[Path]:
    """Returns all parts of a split file in their order; any of them may be given."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    paths = [path.with_name(f'{match[1]}-{number + 1:05}-of-{match[3]}{SUFFIX}') for number in range(int(match[3]))]
    missing = [part.name for part in paths if not part.is_file()]
    if missing or not paths:
        raise InputError(f'{path}: {len(missing)} of {len(paths)} parts are missing, e.g. {missing[:1]}; download them')
    return paths


class _DamagedFileError(Exception):
    """A description of the damage, without the path and the remedy."""


class _Cursor:
    """Reads values from the beginning of a file; raises _DamagedFileError at its end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise _DamagedFileError('it ends in its header')
        self.position += size
        return self.data[self.position - size : self.position]

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f'<{kind}', self.take(struct.calcsize(f'<{kind}')))[0]

    def text(self) -> str:
        return self.take(self.scalar('Q')).decode('utf-8', 'surrogateescape')

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST and depth < _MAX_DEPTH:
            inner, count = self.scalar('I'), self.scalar('Q')
            if inner in _SCALARS:
                size = struct.calcsize(f'<{_SCALARS[inner]}')
                values = np.frombuffer(self.take(count * size), np.dtype(f'<{_SCALARS[inner]}'))
                return values.tolist()
            # Each value has at least the 8 bytes of its length.
            if count > len(self.data) // 8:
                raise _DamagedFileError('it ends in its header')
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedFileError(f'it has a value of the unknown type {kind}')
        found = self.scalar(_SCALARS[kind])
        return float(str(np.float32(found))) if kind == _FLOAT32 else found


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Returns the metadata and the tensors of one file."""
    try:
        with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data), path)
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; give a readable GGUF file') from error
    except (_DamagedFileError, ValueError, struct.error, OverflowError, MemoryError) as error:
        raise InputError(f'{path} is not a complete GGUF file: {error}; download it again') from error


def _parse(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if cursor.take(4) != _MAGIC:
        raise _DamagedFileError('it does not begin with GGUF')
    version = cursor.scalar('I')
    if version not in _VERSIONS:
        order = ' or its byte order is big-endian' if version & 0xFFFF == 0 else ''
        raise _DamagedFileError(f'its version is {version}, not {_VERSIONS[0]} or {_VERSIONS[1]}{order}')
    num_tensors, num_values = cursor.scalar('Q'), cursor.scalar('Q')
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in metadata:
            raise _DamagedFileError(f'key {key:.100} occurs twice')
        metadata[key] = cursor.value(cursor.scalar('I'))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get('general.alignment', 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _DamagedFileError(f'general.alignment={alignment!r:.100} is not a positive number')
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise _DamagedFileError(f'tensor {name:.100} occurs twice')
        tensors[name] = _stored(path, name, shape, number, start + offset, len(cursor.data))
    places = sorted((tensor.offset, tensor.offset + tensor.size, name) for name, tensor in tensors.items())
    for (_, end, name), (offset, _, after) in itertools.pairwise(places):
        if offset < end:
            raise _DamagedFileError(f'tensors {name:.100} and {after:.100} overlap')
    return metadata, tensors


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Returns name, shape, type and offset of a tensor."""
    name, rank = cursor.text(), cursor.scalar('I')
    if not 1 <= rank <= _MAX_DIMS:
        raise _DamagedFileError(f'tensor {name:.100} has {rank} axes')
    # The file has the innermost axis first.
    shape = tuple(cursor.scalar('Q') for _ in range(rank))[::-1]
    return name, shape, cursor.scalar('I'), cursor.scalar('Q')


def _stored(path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, end: int) -> StoredTensor:
    gguf = load_gguf()
    try:
        kind = gguf.GGMLQuantizationType(number)
        values, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise _DamagedFileError(f'tensor {name:.100} has the unknown type {number}') from error
    if shape[-1] % values:
        raise _DamagedFileError(f'tensor {name:.100} {shape} has rows that are not multiples of {values} values')
    length = math.prod(shape) // values * size
    if offset + length > end:
        raise _DamagedFileError(f'it has {end:,} bytes, but tensor {name:.100} ends at {offset + length:,}')
    return StoredTensor(path, shape, kind, offset, length)
