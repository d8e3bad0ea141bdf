"""RPC protocol between a tested program and its tests, which run in a process that the program cannot access.

Calls of the tests run in the program's process. Results are plain data, passed by value, or references to objects of
the program. A program can only return values: it sees neither the tests nor the expected values, and does not control
how values are compared.

Messages are JSON. A request is `['do', function, arguments, keywords]`. A response is `['value', result, changed
arguments]` or `['raise', class names, message]`. While one side waits for a response, it serves requests of the other.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import json
import os
import struct
from collections.abc import Callable
from typing import Any

# Maximum size of a message, so that a program cannot fill the memory of the tests.
MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct('>I')
# Larger integers are encoded in hexadecimal, because parsing long decimal numbers is slow.
MAX_JSON_INT = 1 << 62

SEQUENCES: dict[type, str] = {list: 'l', tuple: 't', set: 's', frozenset: 'f'}
MUTABLE = (list, dict, set, bytearray)
# Standard library types that are passed by value → arguments that construct an equal value.
CONSTRUCTOR_ARGUMENTS: dict[str, Callable[[Any], tuple]] = {
    'fractions.Fraction': lambda value: (value.numerator, value.denominator),
    'decimal.Decimal': lambda value: (str(value),),
    'collections.Counter': lambda value: (dict(value),),
    'collections.OrderedDict': lambda value: (list(value.items()),),
    'collections.deque': lambda value: (list(value), value.maxlen),
    'datetime.date': lambda value: (value.year, value.month, value.day),
    'datetime.time': lambda value: (value.hour, value.minute, value.second, value.microsecond),
    'datetime.datetime': lambda value: (
        *(value.year, value.month, value.day),
        *(value.hour, value.minute, value.second, value.microsecond),
    ),
    'datetime.timedelta': lambda value: (value.days, value.seconds, value.microseconds),
    'builtins.range': lambda value: (value.start, value.stop, value.step),
    'builtins.complex': lambda value: (value.real, value.imag),
}
# Builtins that are passed by name in both directions, as are exceptions.
NAMED_BUILTINS: tuple[Any, ...] = (
    *(abs, all, any, bool, bytearray, bytes, callable, chr, complex, dict, divmod, enumerate, filter, float, frozenset),
    *(hash, hex, int, isinstance, issubclass, iter, len, list, map, max, min, next, object, oct, ord, pow, range, repr),
    *(reversed, round, set, slice, sorted, str, sum, tuple, type, zip),
)
# Marks a reference to a class, in place of the number of its class.
CLASS = -1
# Base classes whose content is sent with an object of a derived class.
PLAIN = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class Ended(Exception):  # noqa: N818 an end, not an error of this side
    """Raised if the other process has ended or sent an invalid message."""


class Channel:
    """Message channel to another process over a descriptor."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def send(self, message: list) -> None:
        """Sends a message.

        Raises:
            Ended: the other process has closed the channel.
            ValueError: the message is too long.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f'message of {len(data)} bytes: must be at most {MAX_MESSAGE_BYTES} bytes')
        view = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            raise Ended(str(error)) from None

    def receive(self) -> list:
        """Receives a message. Raises Ended if the channel is closed or the message is invalid."""
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise Ended(f'message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes')
        try:
            message = json.loads(self.read(length))
        except (ValueError, RecursionError) as error:
            raise Ended(str(error)) from None
        if not isinstance(message, list) or not message:
            raise Ended('invalid message: not a list')
        return message

    def read(self, length: int) -> bytes:
        """Reads exactly `length` bytes."""
        data = bytearray()
        while len(data) < length:
            try:
                chunk = os.read(self.descriptor, min(length - len(data), 1 << 20))
            except OSError as error:
                raise Ended(str(error)) from None
            if not chunk:
                raise Ended('the connection is closed')
            data += chunk
        return bytes(data)


def builtin_name(value: Any) -> str | None:
    """Returns the name of a builtin that is passed by name, else None."""
    name = getattr(value, '__name__', None)
    return name if isinstance(name, str) and builtin_by_name(name) is value else None


def builtin_by_name(name: str) -> Any:
    """Returns the builtin with a name, or None if it is not passed by name."""
    value = getattr(builtins, name, None)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    return value if is_error or any(value is known for known in NAMED_BUILTINS) else None


def encode(value: Any, export: Callable[[Any], list]) -> Any:
    """Encodes a value as JSON. `export` encodes objects that are not exactly of a plain type."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -MAX_JSON_INT < value < MAX_JSON_INT else ['i', hex(value)]
    if kind in SEQUENCES:
        return [SEQUENCES[kind], [encode(item, export) for item in value]]
    if kind is dict:
        return ['d', [[encode(key, export), encode(item, export)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return ['b' if kind is bytes else 'a', base64.b64encode(value).decode()]
    name = f'{kind.__module__}.{kind.__qualname__}'
    if name in CONSTRUCTOR_ARGUMENTS and kind is getattr(importlib.import_module(kind.__module__), kind.__qualname__):
        return ['v', name, [encode(item, export) for item in CONSTRUCTOR_ARGUMENTS[name](value)]]
    return export(value)


def decode(data: Any, restore: Callable[[list], Any]) -> Any:
    """Decodes a value of `encode`. `restore` decodes what `export` encoded. Raises Ended if the data are invalid."""
    if data is None or type(data) in (bool, str, float, int):
        return data
    try:
        tag, *rest = data
        if tag == 'i':
            return int(rest[0], 16)
        if tag in 'ltsf' and isinstance(rest[0], list):
            items = [decode(item, restore) for item in rest[0]]
            return {'l': list, 't': tuple, 's': set, 'f': frozenset}[tag](items)
        if tag == 'd':
            return {decode(key, restore): decode(item, restore) for key, item in rest[0]}
        if tag in 'ab':
            return (bytes if tag == 'b' else bytearray)(base64.b64decode(rest[0]))
        if tag == 'v' and rest[0] in CONSTRUCTOR_ARGUMENTS:
            module, _, name = rest[0].partition('.')
            return getattr(importlib.import_module(module), name)(*(decode(item, restore) for item in rest[1]))
        return restore(data)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise Ended(f'invalid value: {error}') from None


def plain_content(value: Any) -> list:
    """Returns `[content]` of an instance of a plain type, else `[]`. Bypasses methods of derived classes."""
    return next(([plain_copy(kind, value)] for kind in PLAIN if isinstance(value, kind)), [])


def plain_copy(kind: Any, value: Any) -> Any:
    """Returns a plain copy of an instance of a class derived from `kind`."""
    if kind in SEQUENCES:
        return kind(kind.__iter__(value))
    if kind is dict:
        return dict(dict.items(value))
    if kind in (bool, int):
        return int.__add__(value, 0)
    if kind is float:
        return float.__add__(value, 0.0)
    return str.__str__(value) if kind is str else kind(value)


def update(old: Any, new: Any) -> Any:
    """Updates `old` in place to equal `new` and returns it. Returns `new` if the type does not allow this."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        updated = [update(a, b) for a, b in zip(old, new, strict=False)]
        old[:] = updated + new[len(updated) :]
        return old
    if isinstance(old, dict):
        updated_items = {key: update(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(updated_items)
        return old
    if isinstance(old, set):
        old.clear()
        old.update(new)
        return old
    if isinstance(old, bytearray):
        old[:] = new
        return old
    return new
