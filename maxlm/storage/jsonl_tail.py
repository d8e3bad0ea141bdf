"""Follows a file of JSON lines that grows, in a directory or in a bucket: only what is new is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxlm.storage.filesystem import Entry, open_file
from maxlm.storage.json_text import parse_json
from maxlm.storage.jsonl import truncation_note

# So much of what was read is read again and compared: it shows whether the file was written anew, as a run does that
# goes back to an older step.
OVERLAP_BYTES = 512


class JsonlTail:
    """The lines of one file as of the last `update`.

    Whoever watches a run must not end because of a line of it, so unlike `read_lines` it leaves out what is no JSON
    object, and counts that.

    Attributes:
        lines: the objects, oldest first.
        torn: the last line is not whole, and left out.
        bad: other lines that are left out.
    """

    def __init__(self, convert: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line):
        """`convert` is applied to each object."""
        self._convert = convert
        self._forget()

    def _forget(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.torn = False
        self.bad = 0
        self._version: tuple[int, str] | None = None
        # Of whole lines, and the last of their bytes.
        self._read_bytes = 0
        self._overlap = b''

    def update(self, entry: Entry | None) -> bool:
        """Reads what is new.

        Args:
            entry: the file as its directory lists it now; None = it is not there.

        Returns:
            Whether `lines` may have changed.

        Raises:
            StorageError: the file cannot be read; what was read before stays.
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
        """What was left out of the file of this name, a line for each reason."""
        notes = [truncation_note(name)] if self.torn else []
        if self.bad:
            notes.append(f'{name}: {self.bad} line{"s are" if self.bad > 1 else " is"} not JSON and left out')
        return notes

    def _new_bytes(self, path: str) -> bytes | None:
        """What comes after the lines that were read; None where those are not there any more."""
        with open_file(path) as file:
            file.seek(self._read_bytes - len(self._overlap))
            content = file.read()
        return content[len(self._overlap) :] if content.startswith(self._overlap) else None


def _parse(whole: bytes) -> tuple[list[dict[str, Any]], int]:
    """The objects of whole lines, and the number of lines that are none."""
    pieces = whole.split(b'\n')[:-1]
    try:
        # At once is several times faster, and the names of values are kept once instead of for each line.
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
