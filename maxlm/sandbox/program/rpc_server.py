"""RPC server in the program's process. Nothing here is trusted, because the program can modify it."""

from __future__ import annotations

import builtins
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

from maxlm.sandbox.program.rpc_protocol import (
    CLASS,
    MUTABLE,
    PLAIN,
    Channel,
    Ended,
    builtin_by_name,
    builtin_name,
    decode,
    encode,
    plain_content,
)


def call(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Returns `function(*arguments, **keywords)`."""
    return function(*arguments, **keywords)


FUNCTIONS: dict[str, Callable] = {
    'call': call,
    'content': lambda value: plain_content(value)[0],
    'enter': lambda manager: type(manager).__enter__(manager),
    'leave': lambda manager: type(manager).__exit__(manager, None, None, None),
}


class RpcServer:
    """Serves requests of the tests and stores the objects that they reference."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def export(self, value: Any) -> list:
        """Encodes a reference: the object's number, the number of its class or CLASS, and its plain content if any."""
        if isinstance(value, types.ModuleType):
            return ['m', value.__name__]
        if (name := builtin_name(value)) is not None:
            return ['u', name]
        reference = ['r', self.number(value), CLASS if isinstance(value, type) else self.number(type(value))]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ['e', reference[1], *class_names(value)]
        if isinstance(value, PLAIN):
            reference += [encode(content, self.export) for content in plain_content(value)]
        return reference

    def number(self, value: Any) -> int:
        """Returns the number of an object and keeps the object alive."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def restore(self, data: list) -> Any:
        """Decodes a reference: an object of the program, a builtin, or a function of the tests."""
        tag, reference = data[:2]
        if tag == 'r':
            return self.objects[reference]
        if tag == 'u':
            return builtin_by_name(reference)
        return lambda *arguments, **keywords: self.call(reference, arguments, keywords)

    def call(self, function: int, arguments: tuple, keywords: dict) -> Any:
        """Calls a function of the tests."""
        self.channel.send(['do', function, *self.encode_arguments(arguments, keywords)])
        while (response := self.channel.receive())[0] == 'do':
            self.serve(response)
        if response[0] == 'raise':
            raise RuntimeError(f'{response[1][0]} in a function of the tests')
        return decode(response[1], self.restore)

    def encode_arguments(self, arguments: tuple, keywords: dict) -> list:
        """Encodes arguments and keywords as JSON."""
        named = {name: encode(value, self.export) for name, value in keywords.items()}
        return [[encode(value, self.export) for value in arguments], named]

    def serve(self, request: list) -> None:
        """Serves one request."""
        try:
            _, name, encoded, keywords = request
            arguments = [decode(value, self.restore) for value in encoded]
            named = {key: decode(value, self.restore) for key, value in keywords.items()}
            function = FUNCTIONS.get(name) or getattr(operator, name, None) or getattr(builtins, name)
            before = [encode(value, self.export) if isinstance(value, MUTABLE) else None for value in arguments]
            result = function(*arguments, **named)
            changed = [
                [index, after]
                for index, (value, old) in enumerate(zip(arguments, before, strict=True))
                if old is not None and (after := encode(value, self.export)) != old
            ]
            answer = ['value', encode(result, self.export), changed]
            self.channel.send(answer)
        except Ended:
            raise
        except BaseException as error:
            self.channel.send(['raise', class_names(type(error)), str(error)[:1000]])


def class_names(kind: type) -> list[str]:
    """Returns the class names of an exception's MRO, starting with its own."""
    return [base.__name__ for base in kind.__mro__]


def serve_tests(channel: Channel, names: Mapping[str, Any]) -> None:
    """Sends the program's names, then serves requests until the tests end."""
    server = RpcServer(channel)
    try:
        public_names = {name: value for name, value in names.items() if not name.startswith('__')}
        channel.send(['names', {name: encoded_name(server, value) for name, value in public_names.items()}])
        while True:
            server.serve(channel.receive())
    except Ended:
        return


def encoded_name(server: RpcServer, value: Any) -> Any:
    """Encodes a global of the program. Uses a reference if it cannot be encoded by value, such as a recursive list."""
    try:
        return encode(value, server.export)
    except (RecursionError, ValueError):
        return server.export(value)
