"""Small files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from maxlm.errors import InputError, os_message


def put(path: Path, content: bytes) -> None:
    """Writes a file and brings it to the disk before it gets its name; raises InputError when that fails."""
    # A name of its own: several processes may write the same file.
    partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.partial')
    try:
        with partial.open('wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f'{path}: cannot be written: {os_message(error)}') from error
