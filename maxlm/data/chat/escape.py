"""Escapes special-token text in user data with placeholder characters while a chat template is rendered.

Each placeholder replaces one character, so positions in a text do not change.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# The largest private-use character. Placeholders are assigned from here downwards.
_LAST_STAND_IN = 0x10FFFD


@functools.lru_cache
def special_token_pattern(special: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest of some tokens. Without tokens, it matches nothing."""
    return re.compile('|'.join(re.escape(name) for name in sorted(special, key=len, reverse=True)) or r'(?!)')


@functools.lru_cache
def _beginnings(special: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches the first character of each token, also of overlapping tokens."""
    return re.compile(f'(?={special_token_pattern(special).pattern}).', re.DOTALL)


def escape_special_tokens(data: Any, special: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """Replaces the first character of each special token in the data by a placeholder.

    Args:
        data: JSON values. All strings and keys are escaped.
        special: texts of the special tokens.

    Returns:
        The escaped data, and the original character of each placeholder. Placeholders do not occur in `data`.
    """
    beginnings = _beginnings(special)
    strings = list(_strings(data))
    hidden = sorted({found for string in strings for found in beginnings.findall(string)})
    if not hidden:
        return data, {}
    used = set().union(*strings)
    free = (chr(code) for code in range(_LAST_STAND_IN, 0, -1) if chr(code) not in used)
    placeholders = dict(zip(hidden, free, strict=False))
    replaced = _map_strings(data, lambda text: beginnings.sub(lambda found: placeholders[found.group()], text))
    return replaced, {placeholder: character for character, placeholder in placeholders.items()}


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from (key, *_strings(value))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _strings(value)


def _map_strings(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {change(key): _map_strings(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_map_strings(value, change) for value in data]
    return data
