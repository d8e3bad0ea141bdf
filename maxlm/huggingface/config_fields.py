"""Reads values of an external JSON object and checks their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxlm.data.tokenizer.model_files import MAX_IDS
from maxlm.errors import InputError
from maxlm.huggingface.numbers import NUMBERS


class Fields:
    """Reads typed values from a JSON object.

    `source` names the object in error messages, e.g. the path of a config.json. A missing key gives the default. Null
    gives the caller's `null` value if there is one, otherwise it is an error.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def integer(self, key: str, default: int, *, null: int | None = None) -> int:
        """Returns an integer in the range of `NUMBERS`. `null` is the value for null; None: null is not allowed."""
        return default if key not in self.values else self._checked(key, null)

    def number(self, key: str, default: float, *, null: float | None = None) -> float:
        """Returns a number in the range of `NUMBERS`, like `integer`."""
        return float(default if key not in self.values else self._checked(key, null))

    def check_ids(self, key: str, *, may_be_list: bool) -> None:
        """Raises InputError unless a key is absent, null, a token id, or with `may_be_list` a list of token ids."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) and may_be_list else [] if value is None else [value]
        if len(ids) > MAX_IDS or any(index not in NUMBERS[key] for index in ids):
            listed = f', a list of at most {MAX_IDS} such numbers,' if may_be_list else ''
            raise self.error(key, f'must be {NUMBERS[key]}{listed} or null')

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, 'must be true or false')
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, 'must be a string')
        return value

    def _checked(self, key: str, null: float | None) -> Any:
        value = self.values[key]
        if value is None and null is not None:
            return null
        if value not in NUMBERS[key]:
            raise self.error(key, f'must be {NUMBERS[key]}{"" if null is None else " or null"}')
        return value

    def error(self, key: str, reason: str) -> InputError:
        """Returns an error that names the key and its value."""
        value = f'{key}={display_value(self.values[key])}' if key in self.values else key
        return InputError(f'{self.source}: {value}: {reason}')


def display_value(value: Any) -> str:
    """Returns a JSON value for error messages, truncated to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f'{text[:99]}…'
