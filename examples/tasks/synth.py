"""One-line Python functions, checked by unit tests: `Write a Python function f(x) that returns x plus 3.`

The teacher's mistake is a similar function, such as `x > 3` instead of `x >= 3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

from examples.tasks.problem import Problem

NUMBERS = range(2, 40)
# Small constants, for numbers of characters or items and for powers.
FEW = range(2, 10)


class Operation(NamedTuple):
    """A requested function. `{k}` is replaced by a constant.

    Attributes:
        description: description of the returned value.
        right: correct expression.
        wrong: expression that the teacher returns by mistake.
        constants: values for `{k}`.
    """

    description: str
    right: str
    wrong: str
    constants: Sequence[int | str] = NUMBERS


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    'x': (
        Operation('x plus {k}', 'x + {k}', 'x - {k}'),
        Operation('x minus {k}', 'x - {k}', '{k} - x'),
        Operation('{k} minus x', '{k} - x', 'x - {k}'),
        Operation('x times {k}', 'x * {k}', 'x ** {k}'),
        Operation('x to the power of {k}', 'x ** {k}', 'x * {k}', FEW),
        Operation('x divided by {k}, rounded down', 'x // {k}', 'x / {k}'),
        Operation('the remainder of x divided by {k}', 'x % {k}', 'x // {k}'),
        Operation('the larger of x and {k}', 'max(x, {k})', 'min(x, {k})'),
        Operation('the smaller of x and {k}', 'min(x, {k})', 'max(x, {k})'),
        Operation('the distance between x and {k}', 'abs(x - {k})', 'x - {k}'),
        Operation('whether x is greater than {k}', 'x > {k}', 'x >= {k}'),
        Operation('whether x is at least {k}', 'x >= {k}', 'x > {k}'),
        Operation('whether x is less than {k}', 'x < {k}', 'x <= {k}'),
        Operation('whether x is at most {k}', 'x <= {k}', 'x < {k}'),
        Operation('whether x is divisible by {k}', 'x % {k} == 0', 'x // {k} == 0'),
        Operation('twice x, plus {k}', '2 * x + {k}', '2 * (x + {k})'),
        Operation('twice the sum of x and {k}', '2 * (x + {k})', '2 * x + {k}'),
        Operation('the square of x, plus {k}', 'x ** 2 + {k}', '(x + {k}) ** 2'),
    ),
    's': (
        Operation('the first {k} characters of s', 's[:{k}]', 's[{k}:]', FEW),
        Operation('s without its first {k} characters', 's[{k}:]', 's[:{k}]', FEW),
        Operation('the last {k} characters of s', 's[-{k}:]', 's[:-{k}]', FEW),
        Operation('s without its last {k} characters', 's[:-{k}]', 's[-{k}:]', FEW),
        Operation('how often {k} is in s', 's.count({k})', 's.find({k})', ascii_lowercase),
        Operation('where {k} first is in s, or -1', 's.find({k})', 's.rfind({k})', ascii_lowercase),
        Operation('where {k} last is in s, or -1', 's.rfind({k})', 's.find({k})', ascii_lowercase),
        Operation('whether s begins with {k}', 's.startswith({k})', '{k} in s', ascii_lowercase),
        Operation('whether s ends with {k}', 's.endswith({k})', 's.startswith({k})', ascii_lowercase),
        Operation('s without any {k}', "s.replace({k}, '')", 's.strip({k})', ascii_lowercase),
        Operation('s with {k} added to its end', 's + {k}', '{k} + s', ascii_lowercase),
        Operation('s with {k} put before it', '{k} + s', 's + {k}', ascii_lowercase),
    ),
    'xs': (
        Operation('the first {k} items of xs', 'xs[:{k}]', 'xs[{k}:]', FEW),
        Operation('xs without its first {k} items', 'xs[{k}:]', 'xs[:{k}]', FEW),
        Operation('xs repeated {k} times', 'xs * {k}', '[x * {k} for x in xs]', FEW),
        Operation('each item of xs times {k}', '[x * {k} for x in xs]', 'xs * {k}'),
        Operation('each item of xs plus {k}', '[x + {k} for x in xs]', 'xs + [{k}]'),
        Operation('xs with {k} added to its end', 'xs + [{k}]', '[{k}] + xs'),
        Operation('xs with {k} put before it', '[{k}] + xs', 'xs + [{k}]'),
        Operation('the items of xs above {k}', '[x for x in xs if x > {k}]', '[x for x in xs if x >= {k}]'),
        Operation('the items of xs below {k}', '[x for x in xs if x < {k}]', '[x for x in xs if x <= {k}]'),
        Operation('how many items of xs are above {k}', 'sum(x > {k} for x in xs)', 'sum(x for x in xs if x > {k})'),
        Operation('the sum of the items of xs above {k}', 'sum(x for x in xs if x > {k})', 'sum(x > {k} for x in xs)'),
        Operation('the sum of xs, plus {k}', 'sum(xs) + {k}', 'sum(x + {k} for x in xs)'),
        Operation('whether {k} is in xs', '{k} in xs', 'xs == {k}'),
        Operation('how often {k} is in xs', 'xs.count({k})', 'xs.index({k})'),
    ),
}


def make_problems(seed: int) -> list[Problem]:
    """Returns each operation with each of its constants. The result does not depend on `seed`."""
    return [
        _problem(argument, operation, constant)
        for argument, operations in OPERATIONS.items()
        for operation in operations
        for constant in operation.constants
    ]


def _problem(argument: str, operation: Operation, constant: int | str) -> Problem:
    description, right, wrong = (text.format(k=repr(constant)) for text in operation[:3])
    program = f'def f({argument}):\n    return '
    # The expressions come from OPERATIONS, so `eval` is safe.
    function = eval(f'lambda {argument}: {right}')
    tests = [f'assert f({value!r}) == {function(value)!r}' for value in _inputs(argument, constant)]
    question = f'Write a Python function f({argument}) that returns {description}.'
    return Problem(question, program + right, program + wrong, {'tests': tests})


def _inputs(argument: str, constant: int | str) -> list[Any]:
    """Returns arguments near the constant that distinguish the right from the wrong function."""
    if isinstance(constant, str):
        c, other = constant, 'o' if constant != 'o' else 'e'
        return ['', c + other + c + other, c + other, other + c + other + c, 'other']
    k = constant
    if argument == 's':
        return ['', 'programming', 'a' * k + 'b']
    if argument == 'xs':
        return [[k], [k - 1, k, k + 1], [3 * k, 1, k, 2 * k, 7, k, -2], list(range(12))]
    return [0, 1, k - 1, k, k + 1, 3 * k + 1, -5]
