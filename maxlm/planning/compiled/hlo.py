"""Parses the text of a compiled program (XLA's HLO, from `compiled.as_text()`) into instructions.

The text has megabytes, so it is parsed line by line, and the parts of an instruction are parsed lazily.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

# `%name (parameters) -> result {`.
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{')
# Metadata that Pallas writes for profilers, over several lines.
_KERNEL_METADATA = re.compile(r'kernel_metadata=\{\n.*?\n\}', re.DOTALL)
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_PARENTHESIS = re.compile(r'[()]')
_ARRAY = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]')
_OPERAND = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(r', (calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r', branch_computations=\{([^}]*)\}')
_BITS = re.compile(r'[a-z]+(\d+)')


class Array(NamedTuple):
    """Type and dimensions of an array.

    Attributes:
        kind: XLA's name of the type: bf16, f32, s8, pred, …
        dims: sizes of the dimensions.
    """

    kind: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Returns the bytes of the array without padding."""
        bits = _BITS.match(self.kind)
        # pred takes one byte; token and opaque take none.
        width = int(bits.group(1)) / 8 if bits else float(self.kind == 'pred')
        return self.size * width


class Instruction:
    """One line: `name = type opcode(operands), attributes`."""

    def __init__(self, name: str, line: str, is_root: bool) -> None:
        self.name = name
        self.is_root = is_root
        # The type of a tuple contains spaces.
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
        """Returns the text in the parentheses: names, a constant's value or a parameter's index."""
        return self._line[self._start + 1 : self._end - 1]

    @functools.cached_property
    def operands(self) -> list[str]:
        """Returns the names of the instructions that produce the operands."""
        return _OPERAND.findall(self.arguments)

    @functools.cached_property
    def attributes(self) -> str:
        """Returns the rest of the line, from the comma after the parentheses."""
        return self._line[self._end :]

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """Returns the result arrays: one array, or all arrays of a tuple, including nested tuples."""
        found = _ARRAY.findall(self.type)
        return [Array(kind, tuple(int(dim.strip('<=')) for dim in dims.split(',') if dim)) for kind, dims in found]

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """Returns called computations by attribute: calls, to_apply, body, condition; branches have numbers."""
        called = dict(_CALLED.findall(self.attributes))
        branches = _BRANCHES.search(self.attributes)
        if branches:
            called |= {str(number): name for number, name in enumerate(_OPERAND.findall(branches.group(1)))}
        return called

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


class Computation(dict[str, Instruction]):
    """Instructions by name, in execution order if the program is scheduled."""

    name: str = ''

    @property
    def root(self) -> Instruction:
        """Returns the instruction whose value the computation returns."""
        return next(instruction for instruction in reversed(self.values()) if instruction.is_root)


class Module(NamedTuple):
    """A parsed program.

    Attributes:
        entry: computation at which execution starts.
        computations: all computations by name.
        num_partitions: number of devices that the program runs on.
    """

    entry: Computation
    computations: dict[str, Computation]
    num_partitions: int


def parse_hlo(text: str) -> Module:
    """Parses the text of a program.

    Raises:
        ValueError: a line is not valid HLO, or there is no entry computation.
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
                raise ValueError(f'cannot parse a line of the compiled program; report it: {line[:200]!r}')
            current[match.group(2)] = Instruction(match.group(2), line[match.end() :], bool(match.group(1)))
    if entry is None:
        raise ValueError(
            'the compiled program has no ENTRY computation; pass the text from as_text() of a compiled step'
        )
    partitions = re.search(r'num_partitions=(\d+)', text[: text.index('\n')])
    return Module(entry, computations, int(partitions.group(1)) if partitions else 1)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found.group() == '(' else -1
        if not depth:
            return found.end()
    raise ValueError(f'unclosed parenthesis in the compiled program; report it: {text[:200]!r}')
