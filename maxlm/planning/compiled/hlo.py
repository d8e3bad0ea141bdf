"""The text of a compiled program (XLA's HLO, as `compiled.as_text()` gives it), read into instructions.

It is read a line at a time, and an instruction's parts only when they are asked for: the text has megabytes.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

# `%name (parameters) -> result {`.
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{')
# What Pallas tells profilers of a kernel, over several lines.
_KERNEL_METADATA = re.compile(r'kernel_metadata=\{\n.*?\n\}', re.DOTALL)
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_PARENTHESIS = re.compile(r'[()]')
_ARRAY = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(r', (calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r', branch_computations=\{([^}]*)\}')
_BITS = re.compile(r'[a-z]+(\d+)')


class Array(NamedTuple):
    """Type and dimensions of an array."""

    # As XLA names it: bf16, f32, s8, pred, …
    kind: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """What it takes without padding."""
        bits = _BITS.match(self.kind)
        # pred is a byte, token and opaque are nothing.
        width = int(bits.group(1)) / 8 if bits else float(self.kind == 'pred')
        return self.size * width


class Instruction:
    """One line: `name = type opcode(operands), attributes`."""

    def __init__(self, name: str, line: str, is_root: bool) -> None:
        self.name = name
        self.is_root = is_root
        # The type of a tuple has spaces in it.
        end = _closing(line, 0) if line.startswith('(') else line.index(' ')
        self.type = line[:end]
        start = line.index('(', end)
        self.opcode = line[end:start].strip()
        self._line, self._start = line, start

    @functools.cached_property
    def _end(self) -> int:
        return _closing(self._line, self._start)

    @functools.cached_property
    def arguments(self) -> str:
        """What stands in the parentheses: names, or a constant's value, or a parameter's number."""
        return self._line[self._start + 1 : self._end - 1]

    @functools.cached_property
    def operands(self) -> list[str]:
        """The names of the instructions that it takes its operands from."""
        return _OPERAND.findall(self.arguments)

    @functools.cached_property
    def attributes(self) -> str:
        """The rest of the line, from the comma after the parentheses."""
        return self._line[self._end :]

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """What it gives: one array, or those of a tuple, tuples within it included."""
        found = _ARRAY.findall(self.type)
        return [Array(kind, tuple(int(dim.strip('<=')) for dim in dims.split(',') if dim)) for kind, dims in found]

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that it calls, by attribute: calls, to_apply, body, condition; branches have numbers."""
        called = dict(_CALLED.findall(self.attributes))
        branches = _BRANCHES.search(self.attributes)
        if branches:
            called |= {str(number): name for number, name in enumerate(_OPERAND.findall(branches.group(1)))}
        return called

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


class Computation(dict[str, Instruction]):
    """Instructions by name; in the order in which they run where the program is scheduled."""

    name: str = ''

    @property
    def root(self) -> Instruction:
        """The one whose value is the computation's."""
        return next(instruction for instruction in reversed(self.values()) if instruction.is_root)


class Module(NamedTuple):
    """A program."""

    entry: Computation
    computations: dict[str, Computation]
    # Devices that it runs on.
    num_partitions: int


def parse_hlo(text: str) -> Module:
    """Reads the text of a program.

    Raises:
        ValueError: a line that is none of HLO's, or no entry.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _KERNEL_METADATA.sub('kernel_metadata={}', text).splitlines():
        if current is None:
            found = _COMPUTATION.match(line) if line.endswith('{') else None
            if found:
                current = computations[found.group(2)] = Computation()
                current.name = found.group(2)
                entry = current if found.group(1) else entry
        elif line.startswith('}'):
            current = None
        else:
            match = _INSTRUCTION.match(line)
            if match is None:
                raise ValueError(f'a line of a compiled program that cannot be read: {line[:200]!r}')
            current[match.group(2)] = Instruction(match.group(2), line[match.end() :], bool(match.group(1)))
    if entry is None:
        raise ValueError('a compiled program without ENTRY: is it the text that as_text() of a compiled step gives?')
    partitions = re.search(r'num_partitions=(\d+)', text[: text.index('\n')])
    return Module(entry, computations, int(partitions.group(1)) if partitions else 1)


def _closing(text: str, start: int) -> int:
    """The index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found.group() == '(' else -1
        if not depth:
            return found.end()
    raise ValueError(f'a parenthesis that is never closed: {text[:200]!r}')
