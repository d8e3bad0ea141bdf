"""Reads and appends JSON lines. Readers tolerate files that are being written or whose writer was killed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError, os_message
from maxlm.log import logger
from maxlm.storage.atomic import atomic_write
from maxlm.storage.json_text import finite_json, parse_json
from maxlm.storage.regular_files import NotRegularError, read_bytes


class JsonlFile(NamedTuple):
    """Content of a JSON lines file.

    Attributes:
        lines: objects, oldest first.
        torn: True if the last line is truncated. It is skipped. Its writer was killed, or is still writing it.
    """

    lines: list[dict[str, Any]]
    torn: bool


def read_lines(path: Path) -> JsonlFile:
    """Reads the lines of a file. A missing file has no lines.

    Raises:
        InputError: a line other than the last is not a JSON object.
    """
    # A complete file ends with a newline, so the last part is empty or truncated. It may end inside a UTF-8 character.
    *complete, rest = _read(path).split(b'\n')
    return JsonlFile([_parse(path, number, line) for number, line in enumerate(complete, start=1)], bool(rest))


def drop_partial_line(path: Path) -> None:
    """Removes a truncated last line, so that the next appended line starts on its own line."""
    content = _read(path)
    complete = content.rfind(b'\n') + 1
    if complete < len(content):
        with path.open('r+b') as file:
            file.truncate(complete)


def truncation_note(name: str) -> str:
    """Returns the note that a truncated last line was skipped."""
    return f'{name}: skipped the incomplete last line'


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return b''
    except NotRegularError as error:
        raise InputError(f'{path}: {os_message(error)}; move it elsewhere') from error


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f'{path}: line {number} is not JSON ({error}); fix the line') from error
    if not isinstance(value, dict):
        raise InputError(f'{path}: line {number} is not a JSON object; fix the line')
    return value


class JsonlWriter:
    """Appends lines to a file, from any thread. Write errors are logged once and not raised."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        # True until checked, because a killed attempt may have left a truncated line.
        self._torn = True
        self._failing = False

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one line and passes it to the operating system. Non-finite numbers become null."""
        line = _encode(values)
        with self._lock:
            try:
                if self._torn:
                    drop_partial_line(self._path)
                    self._torn = False
                # Reopened for each line, because another process may have replaced the file.
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    self._torn = os.write(file, line) < len(line)
                finally:
                    os.close(file)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                if not self._failing:
                    logger.warning(f'{self._path.name}: cannot be written ({os_message(error)}); training continues')
                self._failing = True
            else:
                self._failing = False

    def replace(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the content of the file atomically."""
        content = b''.join(map(_encode, lines))
        with self._lock:
            try:
                atomic_write(self._path, content)
            except InputError as error:
                logger.warning(f'{error}; the file keeps its previous lines')
            else:
                self._torn = False


def _encode(values: Mapping[str, Any]) -> bytes:
    return f'{finite_json(values)}\n'.encode()
