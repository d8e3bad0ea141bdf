"""Tests trip counts of compiled loops without XLA's notes."""

import re

import jax
import jax.numpy as jnp
import pytest

from maxlm.planning.compiled.program import read_program

# Initial counter, step, condition, number of rounds.
LOOPS = {
    'up': (0, 1, lambda i: i < 6, 6),
    'up to and with': (0, 1, lambda i: i <= 6, 7),
    'from another start': (-3, 1, lambda i: i < 6, 9),
    'in steps': (1, 3, lambda i: i < 9, 3),
    'in steps that fit': (0, 3, lambda i: i < 9, 3),
    'down': (6, -1, lambda i: i > 0, 6),
    'down to and with': (6, -2, lambda i: i >= 0, 4),
    'turned round': (0, 1, lambda i: jnp.int32(5) > i, 5),
    'until': (0, 2, lambda i: i != 8, 4),
}


def products(start, step, goes_on):
    """Returns the counted rounds of a loop with one matmul per round, and the loops of unknown length."""

    def loop(x_BD, w_DD):
        def one_round(carry):
            i, x_BD = carry
            return i + step, jnp.tanh(x_BD @ w_DD)

        return jax.lax.while_loop(lambda carry: goes_on(carry[0]), one_round, (jnp.int32(start), x_BD))[1]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 24), (24, 24))]
    text = jax.jit(loop).lower(*shapes).compile().as_text()
    text = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', '', text)
    assert 'known_trip_count' not in text
    program = read_program(text, {'data': 1})
    return program.flops / (2 * 16 * 24 * 24), program.unknown_loops


@pytest.mark.parametrize('name', LOOPS)
def test_rounds(name):
    start, step, goes_on, expected = LOOPS[name]
    assert products(start, step, goes_on) == (expected, [])


def test_loops_of_unknown_length():
    # The first counter never equals the bound; the condition of the second is not a plain comparison.
    assert products(0, 3, lambda i: i != 8)[1]
    assert products(0, 1, lambda i: i * i < 50)[1]
