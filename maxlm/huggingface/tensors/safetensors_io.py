"""Reads and writes directories of safetensors in parts of tensors: a single file, or numbered shards with an index.

The library's writer requires all tensors of a shard in memory at the same time. The format is a length, a JSON header
and the bytes of the tensors (github.com/huggingface/safetensors), so files are streamed here and memory does not grow
with the shard. Reading uses the library, which checks every header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from maxlm.errors import InputError, os_message
from maxlm.huggingface.tensors.export_dtypes import SAFETENSORS_DTYPES
from maxlm.storage.check_directory import check_entries
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_bytes

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
# Limit of most file systems.
_MAX_NAME_BYTES = 255
# Name on the command line and in config.json → name in the header, and NumPy dtype.
DTYPES: dict[str, tuple[str, Any]] = dict(
    zip(SAFETENSORS_DTYPES, (('BF16', ml_dtypes.bfloat16), ('F16', np.float16), ('F32', np.float32)), strict=True)
)
_READABLE = {header: numpy for header, numpy in DTYPES.values()}
_PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.pkl')
# Bytes of float32 values that are converted at a time.
_BLOCK = 16 * 2**20


class TensorEntry(NamedTuple):
    """A tensor to write: its name, its shape and a function that creates it (float32) when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


class TensorFiles:
    """The tensors of a directory, by name.

    Attributes:
        shapes: name → shape.
        dtypes: name → type in the header, e.g. BF16.
    """

    def __init__(self, directory: Path):
        """Opens all files and reads their headers.

        Raises:
            InputError: there are no files, a file is missing or corrupt, or the files do not match the index.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        # Positions of tensors in the files, for `read_bytes`.
        self._starts: dict[Path, dict[str, int]] = {}
        weight_map = _weight_map(directory)
        names = dict.fromkeys(weight_map.values()) if weight_map else (SINGLE,)
        for path in (directory / name for name in names):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - no mapping, it only has such a method
                if name in self._paths:
                    raise InputError(
                        f'{path}: tensor {name} is also in {self._paths[name].name}; remove one of the two files'
                    )
                view = file.get_slice(name)
                self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), view.get_dtype()
                self._files[name], self._paths[name] = file, path
        for name, file_name in weight_map.items():
            if name not in self._paths or self._paths[name].name != file_name:
                raise InputError(
                    f'{directory / file_name}: no tensor {name}, which {INDEX} lists; download the model again'
                )

    def path(self, name: str) -> Path:
        """Returns the path of the file that contains a tensor."""
        return self._paths[name]

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in float32."""
        values = np.empty(self.shapes[name], np.float32)
        for rows in _blocks(values.shape):
            values[rows] = self._read(name, rows)
        return values

    def equal(self, name: str, other: str) -> bool:
        """Returns True if two tensors have the same values."""
        if self.shapes[name] != self.shapes[other]:
            return False
        return all(
            np.array_equal(self._read(name, rows), self._read(other, rows)) for rows in _blocks(self.shapes[name])
        )

    def check_dtypes(self, names: Sequence[str]) -> None:
        """Raises InputError if a tensor has a dtype that is not supported for parameters."""
        for name in names:
            if self.dtypes[name] not in _READABLE:
                raise InputError(
                    f'{self._paths[name]}: tensor {name} has dtype {self.dtypes[name]}; must be {", ".join(_READABLE)}'
                )

    def read_bytes(self, name: str, rows: slice) -> np.ndarray:
        """Returns rows of a tensor whose elements are one byte each, as bytes; NumPy lacks 8-bit floats."""
        path, row_size = self._paths[name], math.prod(self.shapes[name][1:])
        try:
            with path.open('rb') as file:
                if path not in self._starts:
                    # The library checked the header when it opened the file.
                    size = int.from_bytes(file.read(8), 'little')
                    entries = parse_json(file.read(size)).items()
                    self._starts[path] = {
                        key: 8 + size + entry['data_offsets'][0] for key, entry in entries if key != '__metadata__'
                    }
                file.seek(self._starts[path][name] + rows.start * row_size)
                values = np.frombuffer(file.read((rows.stop - rows.start) * row_size), np.uint8)
                return values.reshape(rows.stop - rows.start, *self.shapes[name][1:])
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def _read(self, name: str, rows: Any) -> np.ndarray:
        try:
            file = self._files[name]
            return file.get_tensor(name) if rows is ... else file.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> InputError:
        return InputError(f'{self._paths[name]}: tensor {name} cannot be read ({error}); download it again')


def write_tensors(
    directory: Path,
    entries: Sequence[TensorEntry],
    *,
    dtype: str,
    max_shard_size: int,
    on_written: Callable[[str], object],
) -> None:
    """Writes tensors in the given order, as one file or as shards of at most `max_shard_size` bytes and an index.

    Args:
        directory: an existing directory.
        entries: the tensors. Each is created once, when it is written.
        dtype: a key of DTYPES.
        max_shard_size: maximum bytes of a shard; a larger tensor gets its own shard.
        on_written: called with the name of each written tensor.

    Raises:
        InputError: a value is not finite, or exceeds the range of the dtype.
    """
    shards = plan_shards({entry.name: entry_bytes(entry, dtype) for entry in entries}, max_shard_size)
    by_name = {entry.name: entry for entry in entries}
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f'model-{number:05}-of-{len(shards):05}.safetensors' for number in range(1, len(shards) + 1)]
        index = {
            'metadata': {'total_size': sum(entry_bytes(entry, dtype) for entry in entries)},
            'weight_map': {name: file for shard, file in zip(shards, names, strict=True) for name in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + '\n', encoding='utf-8')
    for shard, file_name in zip(shards, names, strict=True):
        with (directory / file_name).open('wb') as file:
            file.write(_header([by_name[name] for name in shard], dtype))
            for name in shard:
                write_values(file, by_name[name], dtype)
                on_written(name)


def plan_shards(sizes: Mapping[str, int], max_shard_size: int) -> list[list[str]]:
    """Splits tensors, in order, into shards of at most `max_shard_size` bytes; a larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    shard_size = 0
    for name, size in sizes.items():
        if shards[-1] and shard_size + size > max_shard_size:
            shards.append([])
            shard_size = 0
        shards[-1].append(name)
        shard_size += size
    return shards


def entry_bytes(entry: TensorEntry, dtype: str) -> int:
    """Returns the size of a tensor in a file, in bytes."""
    return math.prod(entry.shape) * np.dtype(DTYPES[dtype][1]).itemsize


def _header(entries: Sequence[TensorEntry], dtype: str) -> bytes:
    # Transformers uses the metadata to recognize files of PyTorch.
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
    start = 0
    for entry in entries:
        end = start + entry_bytes(entry, dtype)
        header[entry.name] = {'dtype': DTYPES[dtype][0], 'shape': entry.shape, 'data_offsets': [start, end]}
        start = end
    text = json.dumps(header, separators=(',', ':')).encode()
    # Tensors start at multiples of 8 bytes, as in files of the library.
    text += b' ' * (-len(text) % 8)
    return len(text).to_bytes(8, 'little') + text


def write_values(file: IO[bytes], entry: TensorEntry, dtype: str) -> None:
    array = entry.make()
    assert array.shape == entry.shape, (entry.name, array.shape, entry.shape)
    for rows in _blocks(entry.shape):
        values = array[rows]
        if not np.isfinite(values).all():
            raise InputError(f'{entry.name}: contains values that are not finite; export another step')
        with np.errstate(over='ignore'):
            # Convert in memory order and transpose afterwards: twice as fast for a transposed view.
            block = np.ascontiguousarray(values.astype(DTYPES[dtype][1], copy=False))
        if not np.isfinite(block).all():
            largest = float(np.abs(values).max())
            others = ' or '.join(name for name in DTYPES if name != dtype)
            raise InputError(f'{entry.name}: {largest:g} is outside the range of {dtype}; use --dtype={others}')
        file.write(block.view(np.uint8).data)


def _blocks(shape: tuple[int, ...]) -> Iterator[Any]:
    """Yields slices of rows that are converted at a time, or Ellipsis for a scalar."""
    if not shape:
        yield ...
        return
    rows = max(1, _BLOCK // (4 * max(1, math.prod(shape[1:]))))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def _weight_map(directory: Path) -> dict[str, str]:
    """Returns tensor → file name from the index; empty for a single file without an index."""
    check_entries(directory, (SINGLE,), limit=None)
    check_entries(directory, (INDEX,))
    # As in Transformers, a single file takes precedence.
    if (directory / SINGLE).is_file():
        return {}
    path = directory / INDEX
    if not path.is_file():
        raise _no_tensors(directory)
    try:
        weight_map = parse_json(read_bytes(path))['weight_map']
        if not weight_map:
            raise ValueError('weight_map must not be empty')
        for name in set(weight_map.values()):
            # An index of unknown origin must not reference files outside of its directory.
            is_name = isinstance(name, str) and name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES
            if not is_name or Path(name).name != name:
                raise ValueError(f'{name!r:.100} must be the name of a file in this directory')
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; check the directory of the model') from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f'{path}: no valid weight_map ({error}); download the file again') from error
    check_entries(directory, sorted(set(weight_map.values())), limit=None)
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise InputError(f'{directory / name}: missing, but {INDEX} lists it; download the model again')
    return weight_map


def _no_tensors(directory: Path) -> InputError:
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        return InputError(
            f'{directory}: {pickles[0]}: pickle files can run code and are not supported, and {SINGLE} is missing; '
            'convert them to safetensors first'
        )
    others = sorted(path.name for path in directory.glob('*.safetensors'))
    hint = f' (found {others[0]})' if others else ''
    return InputError(f'{directory}: no {SINGLE} and no {INDEX}{hint}; use a model in the format of Transformers')


def _open(path: Path) -> Any:
    try:
        # Use reads instead of mmap, because pages of a mapped file count as memory until it is closed.
        return safe_open(str(path), framework='np', backend='pread')
    except (SafetensorError, OSError) as error:
        raise InputError(f'{path}: not a complete safetensors file ({error}); download it again') from error
