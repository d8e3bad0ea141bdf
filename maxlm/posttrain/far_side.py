"""The tests' side: what the program has made, as objects that ask it. See `far_objects`."""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from maxlm.posttrain.far_objects import MUTABLE, Channel, Ended, builtin_name, builtin_named, decode, encode, update

ABSENT = object()
BINARY = {
    **{'add': 'add', 'sub': 'sub', 'mul': 'mul', 'truediv': 'truediv', 'floordiv': 'floordiv', 'mod': 'mod'},
    **{'pow': 'pow', 'matmul': 'matmul', 'lshift': 'lshift', 'rshift': 'rshift', 'xor': 'xor'},
    **{'and': 'and_', 'or': 'or_'},
}
UNARY = {'neg': 'neg', 'pos': 'pos', 'abs': 'abs', 'invert': 'invert'}
ASKED = ('repr', 'reversed', 'round', 'next')
# The program answers with text, a number …, and nothing else will do.
TYPED = {'str': str, 'int': int, 'float': float, 'complex': complex, 'bytes': bytes, 'index': int}


class FarSide:
    """The program that is tested: its names, and how to ask it."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.functions: list[Callable] = []
        self.known: dict[int, Any] = {}
        self.errors: dict[str, type[BaseException]] = {}
        first = channel.receive()
        if first[0] != 'names' or not isinstance(first[1], dict):
            raise Ended('no names')
        self.names = {name: decode(value, self.restore) for name, value in first[1].items()}

    def ask(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Has `function` called there, and carries over what it does to lists and the like among the arguments."""
        encoded = [encode(value, self.export) for value in arguments]
        named = {name: encode(value, self.export) for name, value in keywords.items()}
        self.channel.send(['do', function, encoded, named])
        while (answer := self.channel.receive())[0] == 'do':
            self.serve(answer)
        if answer[0] == 'raise':
            raise self.error(answer)
        try:
            _, result, changes = answer
            for place, content in changes:
                if isinstance(arguments[place], MUTABLE):
                    update(arguments[place], decode(content, self.restore))
        except (TypeError, ValueError, IndexError) as error:
            raise Ended(f'an answer that makes no sense: {error}') from None
        return decode(result, self.restore)

    def serve(self, request: list) -> None:
        """Calls a function that the tests have handed over."""
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
        """Objects of the program go back to it; functions are called here. TypeError for others."""
        if isinstance(value, FarObject):
            return ['r', value.far_number]
        if isinstance(value, type) and issubclass(value, BaseException) and hasattr(value, 'far_number'):
            return ['r', value.far_number]
        if (name := builtin_name(value)) is not None:
            return ['u', name]
        if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            self.functions.append(value)
            return ['k', len(self.functions) - 1]
        raise TypeError(f'tests can hand plain data and functions to a program, not {type(value).__name__}')

    def restore(self, data: list) -> Any:
        """A module (of this side, if it is loaded), a builtin, an exception class or a far object."""
        tag, which, *rest = data
        if tag == 'm':
            return sys.modules.get(which) if which.partition('.')[0] in sys.stdlib_module_names else None
        if tag == 'u':
            return builtin_named(which)
        if tag == 'e':
            return self.error_class(which, rest)
        if tag != 'r' or type(which) is not int:
            raise ValueError(f'{tag!r} is no kind of value')
        if which not in self.known:
            content = decode(rest[0], self.restore) if rest else ABSENT
            self.known[which] = FarObject(self, which, content)
        return self.known[which]

    def error_class(self, number: int, names: list[str]) -> type[BaseException]:
        """The program's exception class, to be caught here."""
        if names[0] not in self.errors:
            self.errors[names[0]] = type(names[0], (builtin_error(names),), {'far_number': number})
        return self.errors[names[0]]

    def error(self, answer: list) -> BaseException:
        """The exception that an answer tells of."""
        try:
            _, names, message = answer
            kind = next((self.errors[name] for name in names if name in self.errors), None) or builtin_error(names)
            return kind(str(message))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise Ended(f'an error that makes no sense: {error}') from None


def builtin_error(names: list[str]) -> type[Exception]:
    """The nearest of the classes that Python has; what is none of the Exceptions, as SystemExit, ends no tests."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            return kind
    return RuntimeError


class FarObject:
    """An object of the program, or of a class derived from plain data with its content.

    It equals itself, another of the program's that says so, and plain data that its content equals; it is neither less
    nor more than anything else, and holds what it yields. The program has no say in comparisons with plain data.
    """

    def __init__(self, side: FarSide, number: int, content: Any):
        object.__setattr__(self, 'far_side', side)
        object.__setattr__(self, 'far_number', number)
        object.__setattr__(self, 'far_content', content)

    def __getattr__(self, name):
        return self.far_side.ask('getattr', self, name)

    def __setattr__(self, name, value):
        self.far_side.ask('setattr', self, name, value)

    def __delattr__(self, name):
        self.far_side.ask('delattr', self, name)

    def __call__(self, *arguments, **keywords):
        return self.far_side.ask('call', self, *arguments, **keywords)

    def __instancecheck__(self, value):
        return isinstance(value, FarObject) and self.far_side.ask('isinstance', value, self) is True

    def __hash__(self):
        return hash(self.far_number) if self.far_content is ABSENT else hash(self.far_content)

    def __bool__(self):
        return self.far_side.ask('truth', self) is True if self.far_content is ABSENT else bool(self.far_content)

    def __len__(self):
        if self.far_content is not ABSENT:
            return len(self.far_content)
        return expect(int, self.far_side.ask('len', self))

    def __iter__(self):
        if self.far_content is not ABSENT:
            return iter(self.far_content)
        iterator = self.far_side.ask('iter', self)
        return iterator if isinstance(iterator, FarObject) else iter(iterator)

    def __contains__(self, value):
        return any(value is item or value == item for item in self)

    def __getitem__(self, key):
        return self.far_side.ask('getitem', self, key)

    def __setitem__(self, key, value):
        self.far_side.ask('setitem', self, key, value)

    def __delitem__(self, key):
        self.far_side.ask('delitem', self, key)

    def __enter__(self):
        return self.far_side.ask('enter', self)

    def __exit__(self, *error):
        self.far_side.ask('leave', self)


def expect(kind: type, value: Any) -> Any:
    """The value; TypeError unless it is exactly of that type."""
    if type(value) is not kind:
        raise TypeError(f'{kind.__name__} expected, the program gave {type(value).__name__}')
    return value


def content_of(value: Any) -> Any:
    """What a value is compared by; ABSENT for an object that is no plain data."""
    return value.far_content if isinstance(value, FarObject) else value


def comparison(name: str) -> Callable:
    """__eq__, __lt__ …: by contents where both have one, by the program's word only among its own objects."""

    def compare(self, other):
        mine, others = content_of(self), content_of(other)
        if mine is not ABSENT and others is not ABSENT:
            return getattr(operator, name)(mine, others)
        if mine is ABSENT and others is ABSENT:
            return (
                (name == 'eq')
                if other is self and name in ('eq', 'ne')
                else self.far_side.ask(name, self, other) is True
            )
        return {'eq': False, 'ne': True}.get(name, NotImplemented)

    return compare


def asked(function: str, *, swapped: bool = False) -> Callable:
    """A special method that the program answers."""

    def method(self, *arguments):
        return self.far_side.ask(function, *((*arguments, self) if swapped else (self, *arguments)))

    return method


def typed(function: str, kind: type) -> Callable:
    """A special method whose result must be exactly of one type."""
    return lambda self: expect(kind, self.far_side.ask(function, self))


for _name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge'):
    setattr(FarObject, f'__{_name}__', comparison(_name))
for _name, _function in BINARY.items():
    setattr(FarObject, f'__{_name}__', asked(_function))
    setattr(FarObject, f'__r{_name}__', asked(_function, swapped=True))
for _name, _function in {**UNARY, **{name: name for name in ASKED}}.items():
    setattr(FarObject, f'__{_name}__', asked(_function))
for _name, _kind in TYPED.items():
    setattr(FarObject, f'__{_name}__', typed(_name, _kind))
