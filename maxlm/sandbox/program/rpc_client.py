"""The tests' side: what the program has made, as objects that ask it. See `far_objects`."""

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
    builtin_name,
    builtin_named,
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
# Methods of plain data that change it.
MUTATING = frozenset(
    [
        *('append', 'extend', 'insert', 'remove', 'pop', 'clear', 'sort', 'reverse', 'add', 'discard', 'update'),
        *('popitem', 'setdefault', 'difference_update', 'intersection_update', 'symmetric_difference_update'),
    ]
)
# Methods of plain data that are true or false, such as `issubset`: nothing but plain data answers them.
DECIDING = frozenset(name for kind in PLAIN for name in dir(kind) if name.startswith('is') or name.endswith('swith'))
# The program answers with a number …, and nothing else will do.
TYPED = {'int': int, 'float': float, 'complex': complex, 'bytes': bytes, 'index': int}


class RefusedError(TypeError):
    """Tests use an object of the program where only plain data decide."""


class RpcClient:
    """The program that is tested: its names, and how to ask it.

    Attributes:
        made: numbers of the classes that the tests have called.
        refused: the first refusal since the last `take_refusal`, '' for none.
    """

    def __init__(self, channel: Channel):
        self.channel = channel
        self.functions: list[Callable] = []
        self.known: dict[int, Any] = {}
        self.errors: dict[str, type[BaseException]] = {}
        self.made: set[int] = set()
        self.refused = ''
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
        if isinstance(value, RemoteObject):
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
            kind, *content = rest
            self.known[which] = RemoteObject(self, which, kind, decode(content[0], self.restore) if content else ABSENT)
        return self.known[which]

    def refuse(self, what: str) -> NoReturn:
        """Raises RefusedError, which counts even where the tests catch it."""
        self.refused = self.refused or f'{what} of an object of the program: tests compare and compute with plain data'
        raise RefusedError(self.refused)

    def take_refusal(self) -> str | None:
        """The first refusal since the last call."""
        refused, self.refused = self.refused, ''
        return refused or None

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


class RemoteObject:
    """An object of the program, or of a class derived from plain data with its content.

    With a content it is compared and computed with as that content, and has the methods of plain data; the program has
    no part in it. Without one it equals itself alone, and everything else that a test compares or computes with it is
    refused. Only an object of a class that the tests call takes arguments in its methods.
    """

    def __init__(self, side: RpcClient, number: int, kind: int, content: Any, *, is_method: bool = False):
        """`is_method`: whether it is an attribute of an object that takes no arguments."""
        for name, value in (('side', side), ('number', number), ('kind', kind), ('content', content)):
            object.__setattr__(self, f'far_{name}', value)
        object.__setattr__(self, 'far_is_method', is_method)

    def far_is_open(self):
        """Returns whether the object may receive arguments of the tests."""
        return not self.far_is_method and (self.far_kind == CLASS or self.far_kind in self.far_side.made)

    def far_data(self):
        """The content as it is now; ABSENT for an object that is no plain data."""
        if isinstance(self.far_content, MUTABLE) and self.far_is_open():
            return expect(type(self.far_content), self.far_side.ask('content', self))
        return self.far_content

    def far_open(self, what):
        """Refuses what only an object of a class that the tests call may do."""
        if not self.far_is_open():
            self.far_side.refuse(what)

    def __getattr__(self, name):
        data = self.far_content
        if data is ABSENT and name in DECIDING:
            self.far_side.refuse(f'method {name}')
        if data is not ABSENT and hasattr(data, name) and not (name in MUTATING and self.far_is_open()):
            return getattr(self.far_data(), name)
        found = self.far_side.ask('getattr', self, name)
        if isinstance(found, RemoteObject) and found.far_content is ABSENT and not self.far_is_open():
            return RemoteObject(found.far_side, found.far_number, found.far_kind, ABSENT, is_method=True)
        return found

    def __setattr__(self, name, value):
        self.far_open('setting an attribute')
        self.far_side.ask('setattr', self, name, value)

    def __delattr__(self, name):
        self.far_open('deleting an attribute')
        self.far_side.ask('delattr', self, name)

    def __call__(self, *arguments, **keywords):
        if self.far_is_method and (arguments or keywords):
            self.far_side.refuse('an argument for a method')
        if self.far_kind == CLASS:
            self.far_side.made.add(self.far_number)
        return self.far_side.ask('call', self, *arguments, **keywords)

    def __instancecheck__(self, value):
        return isinstance(value, RemoteObject) and self.far_side.ask('isinstance', value, self) is True

    def __hash__(self):
        return hash((RemoteObject, self.far_number)) if self.far_content is ABSENT else hash(self.far_content)

    def __bool__(self):
        return self.far_side.ask('truth', self) is True if self.far_content is ABSENT else bool(self.far_data())

    def __len__(self):
        if self.far_content is not ABSENT:
            return len(self.far_data())
        return expect(int, self.far_side.ask('len', self))

    def __iter__(self):
        if self.far_content is not ABSENT:
            return iter(self.far_data())
        iterator = self.far_side.ask('iter', self)
        return iterator if isinstance(iterator, RemoteObject) else iter(iterator)

    def __next__(self):
        return self.far_side.ask('next', self)

    def __reversed__(self):
        return self.far_side.ask('reversed', self) if self.far_content is ABSENT else reversed(self.far_data())

    def __contains__(self, value):
        if self.far_content is not ABSENT:
            return value in self.far_data()
        return any(value is item or value == item for item in self)

    def __getitem__(self, key):
        if self.far_content is not ABSENT:
            return self.far_data()[key]
        self.far_open('an item')
        return self.far_side.ask('getitem', self, key)

    def __setitem__(self, key, value):
        self.far_open('setting an item')
        self.far_side.ask('setitem', self, key, value)

    def __delitem__(self, key):
        self.far_open('deleting an item')
        self.far_side.ask('delitem', self, key)

    def __enter__(self):
        return self.far_side.ask('enter', self)

    def __exit__(self, *error):
        self.far_side.ask('leave', self)

    def __repr__(self):
        return expect(str, self.far_side.ask('repr', self))

    def __str__(self):
        return expect(str, self.far_side.ask('str', self))

    def __format__(self, spec):
        if self.far_content is not ABSENT:
            return format(self.far_data(), spec)
        return self.far_side.refuse('formatting') if spec else str(self)

    def __round__(self, *digits):
        if self.far_content is not ABSENT:
            return round(self.far_data(), *digits)
        return self.far_side.refuse('rounding') if digits else self.far_side.ask('round', self)


def expect(kind: type, value: Any) -> Any:
    """The value; TypeError unless it is exactly of that type."""
    if type(value) is not kind:
        raise TypeError(f'{kind.__name__} expected, the program gave {type(value).__name__}')
    return value


def data_of(value: Any) -> Any:
    """What a value is compared by; ABSENT for an object that is no plain data."""
    return value.far_data() if isinstance(value, RemoteObject) else value


def comparison(name: str) -> Callable:
    """__eq__, __lt__ …: by plain data alone, but for an object and itself."""

    def compare(self, other):
        mine, others = data_of(self), data_of(other)
        if mine is not ABSENT and others is not ABSENT:
            return getattr(operator, name)(mine, others)
        if name in ('eq', 'ne') and isinstance(other, RemoteObject) and other.far_number == self.far_number:
            return name == 'eq'
        return self.far_side.refuse('a comparison')

    return compare


def operation(function: Callable, *, swapped: bool) -> Callable:
    """__add__, __rsub__ …: by plain data; objects of the program alone are left to the program."""

    def method(self, other):
        operands = (other, self) if swapped else (self, other)
        mine, others = map(data_of, operands)
        if mine is not ABSENT and others is not ABSENT:
            return function(mine, others)
        if mine is others is ABSENT and function is not divmod:
            return self.far_side.ask(function.__name__, *operands)
        return self.far_side.refuse('an operation')

    return method


def unary(name: str) -> Callable:
    """__neg__, __abs__ …: of the content, or by the program."""

    def method(self):
        data = self.far_data()
        return self.far_side.ask(name, self) if data is ABSENT else getattr(operator, name)(data)

    return method


def typed(name: str, kind: type) -> Callable:
    """__int__, __float__ …: of the content, or by the program, exactly of one type."""

    def method(self):
        data = self.far_data()
        if data is ABSENT:
            return expect(kind, self.far_side.ask(name, self))
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
    setattr(RemoteObject, f'__{_name}__', typed(_name, _kind))
