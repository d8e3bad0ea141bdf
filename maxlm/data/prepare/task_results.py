"""Stores results of tasks in small JSON files, written atomically, with a checksum of the inputs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.storage.atomic import atomic_write
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_bytes

# Increment this when the same input gives a different result.
RESULT_VERSION = 1


def identity_of(*values: Any) -> str:
    """Returns a checksum of JSON values. Pass everything that determines a result."""
    return hashlib.sha256(json.dumps([RESULT_VERSION, *values]).encode()).hexdigest()


def save_result(path: Path, identity: str, result: dict[str, Any]) -> None:
    """Writes JSON values and the identity. Raises InputError if the file cannot be written."""
    atomic_write(path, json.dumps({'identity': identity, **result}))


def load_result(path: Path, identity: str) -> dict[str, Any] | None:
    """Returns the values that `save_result` wrote; None if the file is missing, damaged or has a different identity."""
    try:
        result: dict[str, Any] = parse_json(read_bytes(path, limit=MAX_TEXT_BYTES))
        return result if result['identity'] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pack(array: np.ndarray) -> str:
    """Compresses an array to a string. Counts of 10⁵ ids, most of them 0, take kilobytes."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(stream.getvalue(), level=1)).decode()


def unpack(text: str) -> np.ndarray:
    """Returns the array that `pack` compressed. Raises ValueError for any other string."""
    try:
        return np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))), allow_pickle=False)
    except (zlib.error, EOFError) as error:
        raise ValueError(f'must be a packed array ({error})') from error
