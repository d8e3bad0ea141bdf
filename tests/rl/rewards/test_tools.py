"""Tests tools of the user, in this process and in the sandbox."""

import pytest

from maxlm.errors import InputError
from maxlm.rl.rewards.tools import Tools, tool_function
from maxlm.sandbox.functions import FunctionPool
from tests.user_modules import write_module

BODY = '''
def add(a: int, b: int = 1) -> dict:
    """Adds two numbers."""
    return {'sum': a + b}
def divide(function: float) -> float:
    """Divides 1 by a number."""
    return 1 / function
def damage() -> str:
    """Returns an unpaired surrogate."""
    return chr(0xD800)
def undescribed(a: int):
    return a
'''
CALLS = [
    ('add', '{"a": 1, "b": 2}'),
    ('divide', '{"function": 4}'),
    ('divide', '{"function": 0}'),
    ('add', '{"c": 1}'),
    ('add', '[1]'),
    ('multiply', '{}'),
    ('damage', '{}'),
]
RESULTS = [
    ('{"sum": 3}', False),
    ('0.25', False),
    ('error: ZeroDivisionError: division by zero', True),
    ("error: TypeError: add() got an unexpected keyword argument 'c'", True),
    ('error: the arguments must be a JSON object', True),
    ("error: no tool 'multiply'; use one of: add, divide, damage", True),
    ('?', False),
]


@pytest.mark.multiprocess
def test_calls(tmp_path, monkeypatch):
    module = write_module(tmp_path, monkeypatch, BODY)
    names = [f'{module}:{name}' for name in ('add', 'divide', 'damage')]
    with FunctionPool([tool_function(name) for name in names], workers=2) as functions:
        sandboxed = Tools(names, functions)
        assert sandboxed.run(CALLS) == RESULTS
    tools = Tools(names)
    assert tools.run(CALLS) == RESULTS
    assert tools.run([]) == []
    assert tools.schemas == sandboxed.schemas
    assert [schema['function']['name'] for schema in tools.schemas] == ['add', 'divide', 'damage']


def test_invalid_tools(tmp_path, monkeypatch):
    module = write_module(tmp_path, monkeypatch, BODY)
    with pytest.raises(InputError, match=f'^tool {module}:undescribed: undescribed has no docstring, .*; fix'):
        Tools([f'{module}:undescribed'])
    with pytest.raises(InputError, match='have the same name'):
        Tools([f'{module}:add', f'{module}:add'])
    with pytest.raises(InputError, match=f"^tool {module}:adds: .* has no 'adds'; did you mean 'add'"):
        Tools([f'{module}:adds'])
