"""Values of a JSON object from elsewhere, checked for their type as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.errors import InputError, os_message
from maxlm.storage.json_text import parse_json


class Fields:
    """Reads typed values. `source` is what messages call the object, e.g. the path of a config.json.

    A key that is absent gives the caller's default; so does null where the caller says that null means it.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def integer(self, key: str, default: int, *, null: int | None = None) -> int:
        """A whole number of at least 1; `null` is what null stands for, where it is allowed."""
        value = self.values.get(key, default)
        if value is None and null is not None:
            return null
        if key in self.values and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.refusal(key, 'needs a whole number of at least 1')
        return value

    def number(self, key: str, default: float, *, null: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None and null is not None:
            return float(null)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(key, 'needs a number')
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, 'needs true or false')
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, 'needs a text')
        return value

    def refusal(self, key: str, why: str) -> InputError:
        """The error that names the key and the value that it has."""
        value = f'{key}={self.values[key]!r}' if key in self.values else key
        return InputError(f'{self.source}: {value}: {why}')


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: the file is missing or holds something else.
    """
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}') from error
    except ValueError as error:
        raise InputError(f'{path}: not JSON ({error}); fetch the file again') from error
    if not isinstance(value, dict):
        raise InputError(f'{path}: holds {type(value).__name__}, needs a JSON object')
    return value
