"""Results of tasks: small files that appear whole or not at all, stamped with what they were made from."""

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

# To be raised whenever the same input would give another result.
RESULT_VERSION = 1


def identity_of(*facts: Any) -> str:
    """Checksum of JSON values: of all that decides a result."""
    return hashlib.sha256(json.dumps([RESULT_VERSION, *facts]).encode()).hexdigest()


def save_result(path: Path, identity: str, facts: dict[str, Any]) -> None:
    """Writes `facts`, JSON values, with their stamp. Raises InputError when that fails."""
    atomic_write(path, json.dumps({'identity': identity, **facts}))


def load_result(path: Path, identity: str) -> dict[str, Any] | None:
    """What `save_result` wrote with the same `identity`; None where there is none such."""
    try:
        facts: dict[str, Any] = parse_json(read_bytes(path, limit=MAX_TEXT_BYTES))
        return facts if facts['identity'] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pack(array: np.ndarray) -> str:
    """An array as a short string: counts of 10⁵ ids, most of them 0, take kilobytes."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(stream.getvalue(), level=1)).decode()


def unpack(text: str) -> np.ndarray:
    """What `pack` made a string of; ValueError for anything else."""
    try:
        return np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))), allow_pickle=False)
    except (zlib.error, EOFError) as error:
        raise ValueError(f'no packed array ({error})') from error
