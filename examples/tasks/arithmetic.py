"""Sums of two 2-digit numbers and products of a digit and a 2-digit number, solved digit by digit.

    58+67    8+7=15 5+6+1=12 #### 125
    7*38     7*8=56 7*3+5=26 #### 266

The teacher's mistake is to forget the carry: `8+7=15 5+6=11 #### 115`. A model trained on these chats produces both
forms; only the reward distinguishes them.
"""

from __future__ import annotations

import random

from examples.tasks.problem import Problem

TWO_DIGITS = range(10, 100)
FACTORS = range(2, 10)


def make_problems(seed: int) -> list[Problem]:
    """Returns all problems, 4095 sums and 720 products; `seed` determines the order of the operands."""
    rng = random.Random(seed)
    sums = [(a, b) for a in TWO_DIGITS for b in TWO_DIGITS if a <= b]
    products = [(factor, number) for factor in FACTORS for number in TWO_DIGITS]
    # One order each, so that a held-out problem is not in the chats with its operands swapped.
    return [_sum(*_shuffled(pair, rng)) for pair in sums] + [_product(*_shuffled(pair, rng)) for pair in products]


def _shuffled(pair: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    return pair if rng.random() < 0.5 else pair[::-1]


def _sum(a: int, b: int) -> Problem:
    (tens_a, units_a), (tens_b, units_b) = divmod(a, 10), divmod(b, 10)
    first, second = f'{units_a}+{units_b}', f'{tens_a}+{tens_b}'
    return _problem(f'{a}+{b}', first, units_a + units_b, second, tens_a + tens_b, a + b)


def _product(a: int, b: int) -> Problem:
    digit, (tens, units) = min(a, b), divmod(max(a, b), 10)
    return _problem(f'{a}*{b}', f'{digit}*{units}', digit * units, f'{digit}*{tens}', digit * tens, a * b)


def _problem(question: str, first: str, units: int, second: str, tens: int, answer: int) -> Problem:
    """Returns a problem; `units` and `tens` are the results of the expressions `first` and `second` without carry."""
    carry = units // 10
    with_carry = f'{second}+{carry}' if carry else second
    right = f'{first}={units} {with_carry}={tens + carry} #### {answer}'
    wrong = f'{first}={units} {second}={tens} #### {10 * tens + units % 10}'
    return Problem(question, right, wrong if carry else '', {'answer': str(answer)})
