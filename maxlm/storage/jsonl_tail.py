"""Follows a growing JSON lines file in a directory or a bucket. Reads only new bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxlm.storage.filesystem import Entry, open_file
from maxlm.storage.json_text import parse_json
from maxlm.storage.jsonl import truncation_note

# Number of already read bytes that are read again and compared. A difference shows that the file was rewritten, which
# happens when a run rolls back to an older step.
OVERLAP_BYTES = 512


class JsonlTail:
    """Lines of one file as of the last `update`.

    Skips and counts lines that are not JSON objects, so that a malformed line cannot crash the monitor. `read_lines`
    raises instead.

    Attributes:
        lines: objects, oldest first.
        torn: True if the last line is truncated. It is skipped.
        bad: number of other skipped lines.
    """

    def __init__(self, convert: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line):
        """
        Args:
            convert: function applied to each object.
        """
        self._convert = convert
        self._forget()

    def _forget(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.torn = False
        self.bad = 0
        self._version: tuple[int, str] | None = None
        # Number of bytes of complete lines that were read, and the last OVERLAP_BYTES of them.
        self._read_bytes = 0
        self._overlap = b''

    def update(self, entry: Entry | None) -> bool:
        """Reads new lines.

        Args:
            entry: current directory entry of the file; None = the file does not exist.

        Returns:
            True if `lines` may have changed.

        Raises:
            StorageError: the file cannot be read. Lines that were read before remain.
        """
        if entry is None:
            had_lines = bool(self.lines)
            self._forget()
            return had_lines
        version = entry.size, entry.version
        if version == self._version and entry.version:
            return False
        content = self._new_bytes(entry.path)
        if content is None:
            self._forget()
            content = self._new_bytes(entry.path) or b''
        end = content.rfind(b'\n') + 1
        whole, rest = content[:end], content[end:]
        found, bad = _parse(whole)
        self.lines += map(self._convert, found)
        self.bad += bad
        self.torn = bool(rest)
        self._read_bytes += len(whole)
        self._overlap = (self._overlap + whole)[-OVERLAP_BYTES:]
        self._version = version
        return True

    def notes(self, name: str) -> list[str]:
        """Returns one note for each kind of skipped line in the file `name`."""
        notes = [truncation_note(name)] if self.torn else []
        if self.bad:
            notes.append(f'{name}: skipped {self.bad} line{"s that are" if self.bad > 1 else " that is"} not JSON')
        return notes

    def _new_bytes(self, path: str) -> bytes | None:
        """Returns the bytes after the lines that were read, or None if the file was rewritten."""
        with open_file(path) as file:
            file.seek(self._read_bytes - len(self._overlap))
            content = file.read()
        return content[len(self._overlap) :] if content.startswith(self._overlap) else None


def _parse(whole: bytes) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of complete lines, and the number of other lines."""
    pieces = whole.split(b'\n')[:-1]
    try:
        # Parsing all lines at once is several times faster, and shares the strings of keys.
        values = parse_json(b'[' + b','.join(pieces) + b']')
    except ValueError:
        values = []
    if len(values) != len(pieces):
        values = [_value(piece) for piece in pieces]
    found = [value for value in values if isinstance(value, dict)]
    return found, len(pieces) - len(found)


def _value(piece: bytes) -> Any:
    try:
        return parse_json(piece)
    except ValueError:
        return None
