"""Tests mutants of a source text: mutated and unchanged expressions."""

import pytest

from tests.conftest import ROOT
from tools.mutate import mutants, sample

SOURCE = '''"""Adds 1."""
import math


def add(x: int, *, twice: bool = False) -> int:
    """Returns x + 1."""
    if x < 0:
        raise ValueError(f'x={x + 1}')
    logger.info('adds')
    check(x)
    limit = 4096
    return x + 1 if not twice and x != 3 else x + 2
'''


def test_each_change_is_one_line():
    found = list(mutants('add.py', SOURCE))
    for mutant in found:
        compile(mutant.applied_to(SOURCE), 'add.py', 'exec')
    assert {mutant.after for mutant in found if mutant.line == 7} == {'    if x <= 0:', '    if x < 1:'}
    assert {mutant.after for mutant in found if mutant.line == 10} == {'    pass'}
    last = {mutant.after for mutant in found if mutant.line == 12}
    assert {'    return None', '    return (x - 1) if not twice and x != 3 else x + 2'} <= last
    # Messages, logs, defaults in signatures, docstrings and large constants are not mutated.
    assert not {1, 2, 5, 6, 8, 9, 11} & {mutant.line for mutant in found}


@pytest.mark.parametrize('count', [1, 16])
def test_packages_take_turns(count, monkeypatch):
    chosen = sample(ROOT, count, seed=3)
    assert chosen == sample(ROOT, count, seed=3)
    assert len({mutant.file.split('/')[1] for mutant in chosen}) >= min(count, 14)
