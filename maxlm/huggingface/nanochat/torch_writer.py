"""Writes tensors as a file that `torch.load` reads, without PyTorch. `torch_reader` describes the format."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from maxlm.huggingface.nanochat.torch_reader import DTYPES
from maxlm.huggingface.tensors.safetensors_io import DTYPES as DTYPE_NAMES
from maxlm.huggingface.tensors.safetensors_io import TensorEntry, entry_bytes, write_values

_ORDERED_DICT = b'ccollections\nOrderedDict\n)R'
# Version of the format that PyTorch has written since 1.6.
_VERSION = b'3\n'


def write_torch_file(
    path: Path, entries: Sequence[TensorEntry], *, dtype: str, on_written: Callable[[str], object]
) -> None:
    """Writes a dict of tensors. Only one tensor is in memory at a time.

    Args:
        path: new file. Equal tensors and names give equal bytes.
        entries: the tensors. Each is created once, when it is written.
        dtype: float32, bfloat16 or float16.
        on_written: called with the name of each written tensor.

    Raises:
        InputError: a value is not finite, or exceeds the range of the dtype.
    """
    folder = path.stem
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as archive:

        def add(name: str, content: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f'{folder}/{name}'), content)

        add('data.pkl', _state_dict(entries, dtype))
        add('byteorder', b'little')
        for key, entry in enumerate(entries):
            info = zipfile.ZipInfo(f'{folder}/data/{key}')
            # Determines whether the entry has 64-bit sizes.
            info.file_size = entry_bytes(entry, dtype)
            with archive.open(info, 'w') as file:
                write_values(file, entry, dtype)
            on_written(entry.name)
        add('version', _VERSION)


def _state_dict(entries: Sequence[TensorEntry], dtype: str) -> bytes:
    """Returns the pickle (protocol 2) of an ordered dictionary of tensors. Tensor K is in storage K."""
    numpy_dtype = DTYPE_NAMES[dtype][1]
    storage = next(name for name, kind in DTYPES.items() if kind == numpy_dtype)
    module, kind = storage.split('.')
    items = b''.join(
        _text(entry.name) + _tensor(entry.shape, f'{module}\n{kind}\n'.encode(), key)
        for key, entry in enumerate(entries)
    )
    return b'\x80\x02' + _ORDERED_DICT + b'(' + items + b'u.'


def _tensor(shape: tuple[int, ...], storage: bytes, key: int) -> bytes:
    """Returns the opcodes of `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`."""
    count = math.prod(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    persistent_id = b'(' + _text('storage') + b'c' + storage + _text(str(key)) + _text('cpu') + _integer(count) + b'tQ'
    sizes, steps = (b'(' + b''.join(map(_integer, numbers)) + b't' for numbers in (shape, strides))
    # \x89 is False.
    arguments = persistent_id + _integer(0) + sizes + steps + b'\x89' + _ORDERED_DICT
    return b'ctorch._utils\n_rebuild_tensor_v2\n(' + arguments + b'tR'


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b'X' + len(encoded).to_bytes(4, 'little') + encoded


def _integer(number: int) -> bytes:
    # LONG1 with 8 bytes.
    return b'\x8a\x08' + number.to_bytes(8, 'little')
