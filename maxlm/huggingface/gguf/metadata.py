"""Typed values of the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from maxlm.errors import InputError
from maxlm.huggingface.config_fields import display_value

_MAX_NUMBER = 2**31
# Keys that do not change the computation: descriptions, and the number of tokens, which the embedding also has.
_IGNORED = ('vocab_size', 'rope.scaling.finetuned')


class Metadata:
    """Typed values of a file by key. Keys of the architecture are given without its name.

    Attributes:
        kind: the architecture.
        source: path of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.kind, self.source = values.get('general.architecture', ''), source
        prefix = f'{self.kind}.'
        self._values = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        self._read: set[str] = set(_IGNORED)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer of at least 0. A list with a value for each layer must have equal values."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
            alike = ', and maxlm supports only layers of one shape' if isinstance(value, list) else ''
            raise self.error(key, f'must be an integer between 0 and {_MAX_NUMBER - 1:,}{alike}; use another file')
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, 'must be a finite number; download the file again')
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, 'must be true or false; download the file again')
        return value

    def value(self, key: str) -> Any:
        """Returns any value, None if the key is missing."""
        self._read.add(key)
        return self._values.get(key)

    def error(self, key: str, reason: str) -> InputError:
        """Returns an error that names the key and its value."""
        found = f'={display_value(self._values[key])}' if key in self._values else ''
        return InputError(f'{self.source}: {self.kind}.{key}{found}: {reason}')

    def check_all_read(self) -> None:
        """Raises InputError for keys of the architecture that nothing has read and that can change the computation."""
        unread = sorted(set(self._values) - self._read)
        if unread:
            raise self.error(
                unread[0],
                'maxlm does not know this setting; if it does not change the computation, remove it with '
                f'`gguf-new-metadata --remove-metadata {self.kind}.{unread[0]}`',
            )

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        if default is None and key not in self._values:
            raise self.error(key, 'is missing; convert the model again')
        return self._values.get(key, default)
