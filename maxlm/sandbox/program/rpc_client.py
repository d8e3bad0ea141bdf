"""RPC client of the tests: proxies of the program's objects. See `rpc_protocol`."""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

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
    update,
)

ABSENT = object()
BINARY = {
    **{'add': 'add', 'sub': 'sub', 'mul': 'mul', 'truediv': 'truediv', 'floordiv': 'floordiv', 'mod': 'mod'},
    **{'pow': 'pow', 'matmul': 'matmul', 'lshift': 'lshift', 'rshift': 'rshift', 'xor': 'xor'},
    **{'and': 'and_', 'or': 'or_'},
}
UNARY = {'neg': 'neg', 'pos': 'pos', 'abs': 'abs', 'invert': 'invert'}
# Mutating methods of plain types.
MUTATING = frozenset(
    [
        *('append', 'extend', 'insert', 'remove', 'pop', 'clear', 'sort', 'reverse', 'add', 'discard', 'update'),
        *('popitem', 'setdefault', 'difference_update', 'intersection_update', 'symmetric_difference_update'),
    ]
)
# Predicates of plain types, such as `issubset`. Only plain data may answer them.
PREDICATES = frozenset(name for kind in PLAIN for name in dir(kind) if name.startswith('is') or name.endswith('swith'))
# Conversions → the exact type of their result.
TYPED = {'int': int, 'float': float, 'complex': complex, 'bytes': bytes, 'index': int}


class RefusedError(TypeError):
    """Raised if tests use an object of the program where only plain data are allowed."""


class RpcClient:
    """Client of a tested program.

    Attributes:
        names: names of the program → values or proxies.
        called_classes: numbers of the classes that the tests have called.
        refusal: the first refusal since the last `pop_refusal`, or ''.
    """

    def __init__(self, channel: Channel):
        self.channel = channel
        self.functions: list[Callable] = []
        self.objects: dict[int, Any] = {}
        self.error_classes: dict[str, type[BaseException]] = {}
        self.called_classes: set[int] = set()
        self.refusal = ''
        greeting = channel.receive()
        if greeting[0] != 'names' or not isinstance(greeting[1], dict):
            raise Ended('no names')
        self.names = {name: decode(value, self.restore) for name, value in greeting[1].items()}

    def call(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Calls `function` in the program and applies its changes to mutable arguments."""
        encoded = [encode(value, self.export) for value in arguments]
        named = {name: encode(value, self.export) for name, value in keywords.items()}
        self.channel.send(['do', function, encoded, named])
        while (response := self.channel.receive())[0] == 'do':
            self.serve(response)
        if response[0] == 'raise':
            raise self.to_exception(response)
        try:
            _, result, changes = response
            for index, content in changes:
                if isinstance(arguments[index], MUTABLE):
                    update(arguments[index], decode(content, self.restore))
        except (TypeError, ValueError, IndexError) as error:
            raise Ended(f'invalid response: {error}') from None
        return decode(result, self.restore)

    def serve(self, request: list) -> None:
        """Calls a function that the tests have passed to the program."""
        try:
            _, number, encoded, keywords = request
            arguments = [decode(value, self.restore) for value in encoded]
            named = {name: decode(value, self.restore) for name, value in keywords.items()}
            result = self.functions[number](*arguments, **named)
            self.channel.send(['value', encode(result, self.export), []])
        except Ended:
            raise
        except Exception as error:
            self.channel.send(['raise', [type(error).__name__], ''])

    def export(self, value: Any) -> list:
        """Encodes a reference to a remote object, a builtin or a function. Raises TypeError for other values."""
        if isinstance(value, RemoteObject):
            return ['r', value.remote_number]
        if isinstance(value, type) and issubclass(value, BaseException) and hasattr(value, 'remote_number'):
            return ['r', value.remote_number]
        if (name := builtin_name(value)) is not None:
            return ['u', name]
        if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            self.functions.append(value)
            return ['k', len(self.functions) - 1]
        raise TypeError(f'tests can pass only plain data and functions to a program, not {type(value).__name__}')

    def restore(self, data: list) -> Any:
        """Decodes a reference: a loaded standard library module, a builtin, an exception class or a remote object."""
        tag, reference, *rest = data
        if tag == 'm':
            return sys.modules.get(reference) if reference.partition('.')[0] in sys.stdlib_module_names else None
        if tag == 'u':
            return builtin_by_name(reference)
        if tag == 'e':
            return self.error_class(reference, rest)
        if tag != 'r' or type(reference) is not int:
            raise ValueError(f'unknown tag {tag!r}: must be m, u, e or r')
        if reference not in self.objects:
            kind, *content = rest
            self.objects[reference] = RemoteObject(
                self, reference, kind, decode(content[0], self.restore) if content else ABSENT
            )
        return self.objects[reference]

    def refuse(self, what: str) -> NoReturn:
        """Raises RefusedError and records it, so that it counts even if the tests catch it."""
        self.refusal = self.refusal or f'{what} of an object of the program is not supported; use plain data in tests'
        raise RefusedError(self.refusal)

    def pop_refusal(self) -> str | None:
        """Returns and clears the first refusal since the last call."""
        refusal, self.refusal = self.refusal, ''
        return refusal or None

    def error_class(self, number: int, names: list[str]) -> type[BaseException]:
        """Returns a local class for an exception class of the program."""
        if names[0] not in self.error_classes:
            self.error_classes[names[0]] = type(names[0], (builtin_error(names),), {'remote_number': number})
        return self.error_classes[names[0]]

    def to_exception(self, response: list) -> BaseException:
        """Converts an error response to an exception."""
        try:
            _, names, message = response
            kind = next(
                (self.error_classes[name] for name in names if name in self.error_classes), None
            ) or builtin_error(names)
            return kind(str(message))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise Ended(f'invalid error: {error}') from None


def builtin_error(names: list[str]) -> type[Exception]:
    """Returns the first builtin subclass of Exception except UnicodeError, else RuntimeError.

    SystemExit and KeyboardInterrupt of the program therefore never end the tests.
    """
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            return kind
    return RuntimeError


class RemoteObject:
    """Proxy of an object of the program.

    An object of a class derived from a plain type has content. It is compared and used in operations as that content,
    and has the methods of the plain type; the program is not involved. An object without content equals only itself,
    and other comparisons and operations with plain data are refused. Only instances of classes that the tests call
    accept arguments in their methods.
    """

    def __init__(self, client: RpcClient, number: int, kind: int, content: Any, *, is_method: bool = False):
        """Initializes the proxy. `is_method` marks an attribute of an object that accepts no arguments."""
        for name, value in (('client', client), ('number', number), ('kind', kind), ('content', content)):
            object.__setattr__(self, f'remote_{name}', value)
        object.__setattr__(self, 'remote_is_method', is_method)

    def remote_is_open(self):
        """Returns True if the object may receive arguments from the tests."""
        return not self.remote_is_method and (
            self.remote_kind == CLASS or self.remote_kind in self.remote_client.called_classes
        )

    def remote_data(self):
        """Returns the current content, or ABSENT if the object has none."""
        if isinstance(self.remote_content, MUTABLE) and self.remote_is_open():
            return expect(type(self.remote_content), self.remote_client.call('content', self))
        return self.remote_content

    def remote_open(self, what):
        """Refuses an operation unless the object is an instance of a class that the tests call."""
        if not self.remote_is_open():
            self.remote_client.refuse(what)

    def __getattr__(self, name):
        data = self.remote_content
        if data is ABSENT and name in PREDICATES:
            self.remote_client.refuse(f'method {name}')
        if data is not ABSENT and hasattr(data, name) and not (name in MUTATING and self.remote_is_open()):
            return getattr(self.remote_data(), name)
        found = self.remote_client.call('getattr', self, name)
        if isinstance(found, RemoteObject) and found.remote_content is ABSENT and not self.remote_is_open():
            return RemoteObject(found.remote_client, found.remote_number, found.remote_kind, ABSENT, is_method=True)
        return found

    def __setattr__(self, name, value):
        self.remote_open('setting an attribute')
        self.remote_client.call('setattr', self, name, value)

    def __delattr__(self, name):
        self.remote_open('deleting an attribute')
        self.remote_client.call('delattr', self, name)

    def __call__(self, *arguments, **keywords):
        if self.remote_is_method and (arguments or keywords):
            self.remote_client.refuse('an argument for a method')
        if self.remote_kind == CLASS:
            self.remote_client.called_classes.add(self.remote_number)
        return self.remote_client.call('call', self, *arguments, **keywords)

    def __instancecheck__(self, value):
        return isinstance(value, RemoteObject) and self.remote_client.call('isinstance', value, self) is True

    def __hash__(self):
        return hash((RemoteObject, self.remote_number)) if self.remote_content is ABSENT else hash(self.remote_content)

    def __bool__(self):
        return (
            self.remote_client.call('truth', self) is True
            if self.remote_content is ABSENT
            else bool(self.remote_data())
        )

    def __len__(self):
        if self.remote_content is not ABSENT:
            return len(self.remote_data())
        return expect(int, self.remote_client.call('len', self))

    def __iter__(self):
        if self.remote_content is not ABSENT:
            return iter(self.remote_data())
        iterator = self.remote_client.call('iter', self)
        return iterator if isinstance(iterator, RemoteObject) else iter(iterator)

    def __next__(self):
        return self.remote_client.call('next', self)

    def __reversed__(self):
        return (
            self.remote_client.call('reversed', self) if self.remote_content is ABSENT else reversed(self.remote_data())
        )

    def __contains__(self, value):
        if self.remote_content is not ABSENT:
            return value in self.remote_data()
        return any(value is item or value == item for item in self)

    def __getitem__(self, key):
        if self.remote_content is not ABSENT:
            return self.remote_data()[key]
        self.remote_open('an item')
        return self.remote_client.call('getitem', self, key)

    def __setitem__(self, key, value):
        self.remote_open('setting an item')
        self.remote_client.call('setitem', self, key, value)

    def __delitem__(self, key):
        self.remote_open('deleting an item')
        self.remote_client.call('delitem', self, key)

    def __enter__(self):
        return self.remote_client.call('enter', self)

    def __exit__(self, *error):
        self.remote_client.call('leave', self)

    def __repr__(self):
        return expect(str, self.remote_client.call('repr', self))

    def __str__(self):
        return expect(str, self.remote_client.call('str', self))

    def __format__(self, spec):
        if self.remote_content is not ABSENT:
            return format(self.remote_data(), spec)
        return self.remote_client.refuse('formatting') if spec else str(self)

    def __round__(self, *digits):
        if self.remote_content is not ABSENT:
            return round(self.remote_data(), *digits)
        return self.remote_client.refuse('rounding') if digits else self.remote_client.call('round', self)


def expect(kind: type, value: Any) -> Any:
    """Returns the value. Raises TypeError unless it is exactly of the type."""
    if type(value) is not kind:
        raise TypeError(f'expected {kind.__name__}, but the program returned {type(value).__name__}')
    return value


def plain_data(value: Any) -> Any:
    """Returns the data by which a value is compared, or ABSENT."""
    return value.remote_data() if isinstance(value, RemoteObject) else value


def comparison(name: str) -> Callable:
    """Returns a comparison method such as __eq__, which uses plain data or object identity only."""

    def compare(self, other):
        left, right = plain_data(self), plain_data(other)
        if left is not ABSENT and right is not ABSENT:
            return getattr(operator, name)(left, right)
        if name in ('eq', 'ne') and isinstance(other, RemoteObject) and other.remote_number == self.remote_number:
            return name == 'eq'
        return self.remote_client.refuse('a comparison')

    return compare


def operation(function: Callable, *, swapped: bool) -> Callable:
    """Returns an operator method such as __add__. Plain data are computed here, two proxies by the program."""

    def method(self, other):
        operands = (other, self) if swapped else (self, other)
        left, right = map(plain_data, operands)
        if left is not ABSENT and right is not ABSENT:
            return function(left, right)
        if left is right is ABSENT and function is not divmod:
            return self.remote_client.call(function.__name__, *operands)
        return self.remote_client.refuse('an operation')

    return method


def unary(name: str) -> Callable:
    """Returns a unary method such as __neg__, computed from the content or, without content, by the program."""

    def method(self):
        data = self.remote_data()
        return self.remote_client.call(name, self) if data is ABSENT else getattr(operator, name)(data)

    return method


def conversion(name: str, kind: type) -> Callable:
    """Returns a conversion method such as __int__, computed from the content or by the program, with an exact type."""

    def method(self):
        data = self.remote_data()
        if data is ABSENT:
            return expect(kind, self.remote_client.call(name, self))
        return operator.index(data) if name == 'index' else kind(data)

    return method


for _name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
    setattr(RemoteObject, f'__{_name}__', comparison(_name))
for _name, _function in {
    **{name: getattr(operator, found) for name, found in BINARY.items()},
    'divmod': divmod,
}.items():
    setattr(RemoteObject, f'__{_name}__', operation(_function, swapped=False))
    setattr(RemoteObject, f'__r{_name}__', operation(_function, swapped=True))
for _name, _function in UNARY.items():
    setattr(RemoteObject, f'__{_name}__', unary(_function))
for _name, _kind in TYPED.items():
    setattr(RemoteObject, f'__{_name}__', conversion(_name, _kind))
