"""Files of JSON lines that a run appends to, and that others read while it does or after it was killed."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError, os_message
from maxlm.log import logger
from maxlm.storage.atomic import atomic_write
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import NotRegularError, read_bytes


class JsonlFile(NamedTuple):
    """What such a file holds.

    Attributes:
        lines: one object each, oldest first.
        torn: the last line is not whole, since its writer was killed or is about to write the rest; it is left out.
    """

    lines: list[dict[str, Any]]
    torn: bool


def read_lines(path: Path) -> JsonlFile:
    """The lines of a file; none where there is no such file.

    Raises:
        InputError: another line than the last is not a JSON object.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return JsonlFile([], False)
    except NotRegularError as error:
        raise InputError(f'{path}: {os_message(error)}') from error
    # A whole file ends with a newline, so the last piece is empty or torn; bytes, since it may end inside a letter.
    *complete, rest = content.split(b'\n')
    return JsonlFile([_parse(path, number, line) for number, line in enumerate(complete, start=1)], bool(rest))


def drop_partial_line(path: Path) -> None:
    """Cuts off a torn last line, so that what is appended next begins a line of its own."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return
    except NotRegularError as error:
        raise InputError(f'{path}: {os_message(error)}') from error
    complete = content.rfind(b'\n') + 1
    if complete < len(content):
        with path.open('r+b') as file:
            file.truncate(complete)


def truncation_note(name: str) -> str:
    """How every reader says that it has left something out."""
    return f'{name}: the last line is torn and left out'


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f'{path}: line {number} is not JSON ({error}); fix the line') from error
    if not isinstance(value, dict):
        raise InputError(f'{path}: line {number} is not a JSON object; fix the line')
    return value


class JsonlWriter:
    """Appends lines to a file, from any thread. A file that cannot be written is said once, and ends nothing."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        # Of a life that was killed in the middle of a line.
        self._torn = True
        self._failing = False

    def write(self, values: Mapping[str, Any]) -> None:
        """One line, which is with the system when this returns; numbers that are not finite become null."""
        line = _encode(values)
        with self._lock:
            try:
                if self._torn:
                    drop_partial_line(self._path)
                    self._torn = False
                # Opened anew for each, since others may have put another file in its place.
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    self._torn = os.write(file, line) < len(line)
                finally:
                    os.close(file)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                if not self._failing:
                    logger.warning(f'{self._path.name}: cannot be written ({os_message(error)}); the run goes on')
                self._failing = True
            else:
                self._failing = False

    def replace(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Puts these in place of what the file holds, all at once or not at all."""
        content = b''.join(map(_encode, lines))
        with self._lock:
            try:
                atomic_write(self._path, content)
            except InputError as error:
                logger.warning(f'{error}; the run goes on with the longer one')
            else:
                self._torn = False


def _encode(values: Mapping[str, Any]) -> bytes:
    return f'{json.dumps(_finite(values))}\n'.encode()


def _finite(value: Any) -> Any:
    """JSON has no NaN; null is what every reader of it takes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
