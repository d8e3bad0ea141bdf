"""Tests JSON schemas of functions."""

import json
from typing import Any, Literal

import pytest

from maxlm.sandbox.program.function_schema import tool_schema, type_schema
from tests.user_modules import write_module

BODY = '''
from __future__ import annotations
from typing import Literal
def search(query: str, *, num: int | None = None, order: Literal['new', 'old'] = 'new', tags: list[str] = ()) -> str:
    """Searches documents
    by words.

    Args:
        query: words,
            separated by spaces.
        num (int): number of results: at most 5.
        order: sorting
    Returns:
        titles
    """
def nothing():
    """Does nothing."""
def silent(a: int): pass
def untyped(a):
    """Has no type hint."""
def complicated(a: complex):
    """Has a type that JSON does not have."""
def wrong(a: Missing):
    """Has a type that does not exist."""
def many(*a: int):
    """Has parameters without names."""
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, BODY)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_schema_of_a_function(module):
    schema = tool_schema(f'{module}:search')
    assert json.loads(json.dumps(schema)) == {
        'type': 'function',
        'function': {
            'name': 'search',
            'description': 'Searches documents by words.',
            'parameters': {
                'type': 'object',
                'properties': {
                    'query': {'type': 'string', 'description': 'words, separated by spaces.'},
                    'num': {
                        'anyOf': [{'type': 'integer'}, {'type': 'null'}],
                        'description': 'number of results: at most 5.',
                    },
                    'order': {'enum': ['new', 'old'], 'description': 'sorting'},
                    'tags': {'type': 'array', 'items': {'type': 'string'}},
                },
                'required': ['query'],
            },
        },
    }
    assert tool_schema(f'{module}:nothing')['function']['parameters'] == {
        'type': 'object',
        'properties': {},
        'required': [],
    }


@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        ('silent', 'silent has no docstring'),
        ('untyped', "the parameter 'a' of untyped has no type hint, e.g. a: str"),
        (
            'complicated',
            "the parameter 'a' of complicated has the type <class 'complex'>, which",
        ),
        ('wrong', "the type hints of wrong cannot be read: name 'Missing' is not defined"),
        ('many', r'the parameter \*a: .*int.* of many cannot be given by name'),
    ],
)
def test_problems(module, name, problem):
    found = tool_schema(f'{module}:{name}')
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)


@pytest.mark.parametrize(
    ('hint', 'schema'),
    [
        (float, {'type': 'number'}),
        (dict, {'type': 'object'}),
        (dict[str, list], {'type': 'object', 'additionalProperties': {'type': 'array'}}),
        (list[bool], {'type': 'array', 'items': {'type': 'boolean'}}),
        (Any, {}),
        (Literal[1, 'a'], {'enum': [1, 'a']}),
        (dict[int, str], None),
        (list[complex], None),
        (int | complex, None),
        (tuple[int], None),
    ],
)  # fmt: skip
def test_types(hint, schema):
    assert type_schema(hint) == schema
