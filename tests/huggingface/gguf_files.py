"""Reads GGUF files with the library gguf."""

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
