"""Determines trip counts of compiled loops: from XLA's annotation, or from counter, step and bound."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from maxlm.planning.compiled.hlo import Computation, Instruction, Module

# Comparisons of a loop that runs while `counter < bound`, including forms that the compiler rewrites it to.
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    'LT': operator.lt,
    'LE': operator.le,
    'GT': operator.gt,
    'GE': operator.ge,
    'NE': operator.ne,
}
# Operations whose result has the value of their first operand.
_SAME = {'copy', 'bitcast', 'convert', 'reshape', 'broadcast', 'copy-start', 'copy-done', 'optimization-barrier'}
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Scope(NamedTuple):
    """A computation with its caller.

    Attributes:
        computation: the computation.
        caller: the calling instruction. None for the entry, whose parameters are unknown.
        outer: scope of the caller.
    """

    computation: Computation
    caller: Instruction | None = None
    outer: Scope | None = None


class _Carried(NamedTuple):
    """The value at an index of a loop's tuple at the start of an iteration, plus a constant."""

    element: int
    plus: int = 0


_Value: TypeAlias = 'int | _Carried | None'


def trip_count(module: Module, loop: Instruction, scope: Scope) -> int | None:
    """Returns the iterations of a `while` in one execution of its computation; None if they cannot be determined.

    Args:
        module: the program.
        loop: the loop instruction.
        scope: scope of the computation that contains the loop.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = Scope(module.computations[loop.called['condition']], loop, scope)
    body = Scope(module.computations[loop.called['body']], loop, scope)
    comparison = _comparison(module, condition, loop)
    if comparison is None:
        return None
    holds, left, right = comparison
    if isinstance(right, _Carried):
        right = _initial_if_kept(module, right, loop, scope, None)
    if not isinstance(left, _Carried) or not isinstance(right, int):
        return None
    start = _element(module, loop, left.element, scope, None)
    after = _returned(module, body, left.element, loop)
    if not isinstance(start, int) or not isinstance(after, _Carried) or after.element != left.element or not after.plus:
        return None
    return _rounds(holds, start + left.plus, after.plus, right)


def _rounds(holds: Callable[[int, int], bool], start: int, step: int, bound: int) -> int | None:
    """Returns the number of times that a counter passes the comparison."""
    if not holds(start, bound):
        return 0
    # Start the search just before the counter reaches the bound.
    rounds = max(0, (bound - start) // step - 1)
    if not holds(start + max(0, rounds - 1) * step, bound):
        return None
    for more in range(4):
        if not holds(start + (rounds + more) * step, bound):
            return rounds + more
    return None


def _comparison(
    module: Module, scope: Scope, loop: Instruction
) -> tuple[Callable[[int, int], bool], _Value, _Value] | None:
    """Returns the loop condition, with the counter on the left."""
    root = scope.computation.root
    while root.opcode in ('fusion', 'call') or root.opcode in _SAME:
        if root.opcode in _SAME:
            root = scope.computation[root.operands[0]]
        else:
            scope = Scope(module.computations[_callee(root)], root, scope)
            root = scope.computation.root
    direction = root.attribute(r'direction=(\w+)')
    if root.opcode != 'compare' or direction not in _COMPARISONS:
        return None
    left, right = (_value(module, scope, name, loop) for name in root.operands)
    if isinstance(left, int):
        mirrored = {'LT': 'GT', 'GT': 'LT', 'LE': 'GE', 'GE': 'LE', 'NE': 'NE'}[direction]
        return _COMPARISONS[mirrored], right, left
    return _COMPARISONS[direction], left, right


def _initial_if_kept(
    module: Module, carried: _Carried, loop: Instruction, scope: Scope, outer: Instruction | None
) -> _Value:
    """Returns the value at an index of the loop's tuple that no iteration changes, relative to the loop `outer`."""
    body = Scope(module.computations[loop.called['body']], loop, scope)
    if _returned(module, body, carried.element, loop) != _Carried(carried.element):
        return None
    return _sum(_element(module, loop, carried.element, scope, outer), carried.plus, 1)


def _returned(module: Module, body: Scope, index: int, loop: Instruction) -> _Value:
    """Returns the value that an iteration leaves at an index of the tuple."""
    root = body.computation.root
    if root.opcode == 'tuple':
        return _value(module, body, root.operands[index], loop)
    return None


def _element(module: Module, taker: Instruction, index: int, scope: Scope, loop: Instruction | None) -> _Value:
    """Returns element `index` of the tuple that is an instruction's first operand."""
    source = scope.computation[taker.operands[0]]
    while source.opcode in _SAME:
        source = scope.computation[source.operands[0]]
    if source.opcode == 'tuple':
        return _value(module, scope, source.operands[index], loop)
    if source.opcode == 'parameter':
        return _of_parameter(module, scope, index, loop)
    if source.opcode == 'fusion':
        inner = Scope(module.computations[_callee(source)], source, scope)
        root = inner.computation.root
        return _value(module, inner, root.operands[index], loop) if root.opcode == 'tuple' else None
    if source.opcode == 'while':
        return _initial_if_kept(module, _Carried(index), source, scope, loop)
    return None


def _of_parameter(module: Module, scope: Scope, index: int, loop: Instruction | None) -> _Value:
    """Returns the value of element `index` of the tuple that a loop passes to its computation."""
    caller, outer = scope.caller, scope.outer
    if caller is None or outer is None or caller.opcode != 'while':
        return None
    if caller is loop:
        return _Carried(index)
    # An outer loop, whose tuple may carry values that never change.
    return _initial_if_kept(module, _Carried(index), caller, outer, loop)


def _value(module: Module, scope: Scope, name: str, loop: Instruction | None) -> _Value:
    """Returns the integer that an instruction computes, relative to an iteration of `loop`; None if unknown."""
    instruction = scope.computation[name]
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == 'constant':
        return int(instruction.arguments) if re.fullmatch(r'-?\d+', instruction.arguments) else None
    if opcode in _SAME:
        return _value(module, scope, operands[0], loop)
    if opcode == 'get-tuple-element':
        return _element(module, instruction, int(instruction.attribute(r'index=(\d+)') or 0), scope, loop)
    if opcode in ('add', 'subtract'):
        left, right = (_value(module, scope, operand, loop) for operand in operands)
        return _sum(left, right, 1 if opcode == 'add' else -1)
    if opcode == 'parameter' and scope.caller is not None and scope.outer is not None:
        if scope.caller.opcode in ('fusion', 'call'):
            return _value(module, scope.outer, scope.caller.operands[int(instruction.arguments)], loop)
        return None
    if opcode in ('fusion', 'call'):
        inner = Scope(module.computations[_callee(instruction)], instruction, scope)
        return _value(module, inner, inner.computation.root.name, loop)
    return None


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Carried) and isinstance(right, int):
        return left._replace(plus=left.plus + sign * right)
    if isinstance(left, int) and isinstance(right, _Carried) and sign == 1:
        return right._replace(plus=right.plus + left)
    return None


def _callee(instruction: Instruction) -> str:
    return instruction.called.get('calls') or instruction.called['to_apply']
