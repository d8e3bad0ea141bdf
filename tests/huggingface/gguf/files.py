"""Reads and writes GGUF files with the library gguf."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip('gguf', reason='the extra gguf')


def read(path: Any) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, Any]]:
    """Returns {name: (type, float32 values)} and the metadata."""
    reader = gguf.GGUFReader(path)
    tensors = {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reader.tensors
    }
    return tensors, {key: field.contents() for key, field in reader.fields.items()}


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Any]]) -> Path:
    """Writes a file with values by key and quantized tensors, and returns its path."""
    writer = gguf.GGUFWriter(path, metadata['general.architecture'])
    for key, value in metadata.items():
        if key == 'general.architecture':
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
