"""Parses pickles as data. Nothing that a pickle names is imported or called.

A pickle is a program for a stack machine (`pickletools` of Python documents its opcodes), and its REDUCE opcode calls
any function. This parser accepts only opcodes that build values, and represents an allowed call by a record of its name
and arguments.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from maxlm.errors import InputError

# A tokenizer of 2²⁰ tokens has 3 opcodes per token. An opcode can create an object of about 100 bytes.
MAX_OPCODES = 2**22
# The class of the dictionaries that `torch.nn.Module.state_dict` returns.
_ORDERED_DICT = 'collections.OrderedDict'
# Opcodes that push their argument, or a constant.
_ARGUMENTS = frozenset(('BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT')) | frozenset(
    size + kind for kind in ('BINUNICODE', 'BINBYTES') for size in ('', 'SHORT_')
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    'NONE': lambda: None,
    'NEWTRUE': lambda: True,
    'NEWFALSE': lambda: False,
    'EMPTY_TUPLE': tuple,
    'EMPTY_LIST': list,
    'EMPTY_DICT': dict,
}
_TUPLES = {'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3}


class Name(NamedTuple):
    """A function or class that a pickle names, as `module.name`."""

    text: str


class PersistentId(NamedTuple):
    """A reference to data outside the pickle, such as a storage of PyTorch."""

    value: Any


@dataclasses.dataclass
class PickledCall:
    """An object that the pickle would create by a call.

    Attributes:
        name: the function or class.
        arguments: its arguments.
        state: the state that the object would receive afterwards; None = none.
    """

    name: str
    arguments: Any
    state: Any = None


def parse_pickle(content: bytes, names: Collection[str], source: str) -> Any:
    """Returns the value of a pickle: plain values and containers, and records of names, calls and persistent ids.

    Args:
        content: the pickle. The caller limits its size.
        names: functions and classes, as `module.name`, that the pickle may name besides ordered dictionaries, which
            become dicts without attributes.
        source: name of the file in error messages.

    Raises:
        InputError: the pickle is damaged, too long, or names other functions. The message has the name.
    """
    parser = _Parser(names, source)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count == MAX_OPCODES:
                raise InputError(f'{source}: the pickle has more than {MAX_OPCODES:,} opcodes; use another file')
            parser.run(opcode.name, argument)
        (value,) = parser.stack
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise InputError(f'{source}: the pickle is damaged ({error}); download or copy the file again') from error
    return value


class _Parser:
    """The stack, the marks and the memo of the stack machine."""

    def __init__(self, names: Collection[str], source: str):
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names, self._source = names, source

    def run(self, opcode: str, argument: Any) -> None:
        """Executes one opcode. Raises ValueError, LookupError or TypeError if the pickle is damaged."""
        stack = self.stack
        if opcode in _ARGUMENTS:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode]())
        elif opcode in ('BINPUT', 'LONG_BINPUT', 'MEMOIZE'):
            self._memo[len(self._memo) if opcode == 'MEMOIZE' else argument] = stack[-1]
        elif opcode in ('BINGET', 'LONG_BINGET'):
            stack.append(self._memo[argument])
        elif opcode == 'MARK':
            self._marks.append(len(stack))
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            stack.append(tuple(self._pop() for _ in range(count))[::-1])
        elif opcode == 'TUPLE':
            stack.append(tuple(self._pop_to_mark()))
        elif opcode in ('SETITEM', 'SETITEMS'):
            items = self._pop_to_mark() if opcode == 'SETITEMS' else [self._pop(), self._pop()][::-1]
            self._set_items(items)
        elif opcode in ('APPEND', 'APPENDS'):
            items = self._pop_to_mark() if opcode == 'APPENDS' else [self._pop()]
            self._top(list).extend(items)
        elif opcode == 'GLOBAL':
            stack.append(self._name(*argument.split(' ')))
        elif opcode == 'STACK_GLOBAL':
            name, module = self._pop(), self._pop()
            stack.append(self._name(module, name))
        elif opcode in ('REDUCE', 'NEWOBJ'):
            arguments, function = self._pop(), self._pop()
            stack.append(_call(function, arguments))
        elif opcode == 'BUILD':
            state = self._pop()
            target = self._top((dict, PickledCall))
            # The attributes of an ordered dictionary are the versions of PyTorch's modules.
            if isinstance(target, PickledCall):
                target.state = state
        elif opcode == 'BINPERSID':
            stack.append(PersistentId(self._pop()))
        elif opcode not in ('PROTO', 'FRAME', 'STOP'):
            raise InputError(f'{self._source}: the pickle has the opcode {opcode}, which is not allowed; {_ADVICE}')

    def _name(self, module: Any, name: Any) -> Name:
        full = f'{module}.{name}' if isinstance(module, str) and isinstance(name, str) else ''
        if full != _ORDERED_DICT and full not in self._names:
            raise InputError(
                f'{self._source}: the pickle names {full[:100] or "no function"}, which is not allowed and was not '
                f'run; {_ADVICE}'
            )
        return Name(full)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of nested tuples can take exponential time.
            if type(key) not in (str, bytes, int):
                raise TypeError('a key of a dictionary has a wrong type')
            target[key] = value

    def _top(self, types: type | tuple[type, ...]) -> Any:
        if not isinstance(self.stack[-1], types):
            raise TypeError('an opcode has an operand of a wrong type')
        return self.stack[-1]

    def _pop(self) -> Any:
        return self.stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


_ADVICE = 'do not load it with another program, because it may run code of its author'


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Name):
        raise TypeError('a call of no function')
    return {} if function.text == _ORDERED_DICT else PickledCall(function.text, arguments)
