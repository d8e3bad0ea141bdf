"""Descriptions of Python functions as tools: JSON schemas from their type hints and docstrings.

| type hint | JSON schema |
|---|---|
| `str`, `int`, `float`, `bool` | string, integer, number, boolean |
| `list`, `list[T]` | array |
| `dict`, `dict[str, T]` | object |
| `Literal['a', 'b']` | enum |
| `T \\| None`, unions | anyOf |
| `Any`, `object` | no restriction |
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from typing import Any

TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean', list: 'array', dict: 'object'}
# Sections of a docstring in Google's style, the one of the arguments, and an argument in it.
_SECTION = re.compile(r'^(?:Args|Returns|Yields|Raises|Examples?):$', re.MULTILINE)
_ARGUMENTS = re.compile(r'^Args:\n((?:[ \t]+.*\n?|\n)*)', re.MULTILINE)
_ARGUMENT = re.compile(r'^(\s*)\*{0,2}(\w+)(?: \([^)]*\))?:[ \t]*(.*)')


def tool_schema(name: str) -> dict[str, Any] | str:
    """Returns the tool `package.module:function` in the form of OpenAI's API, or a problem as text.

    The description is the docstring before its first section, e.g. `Args:`, which describes the parameters.
    """
    module, _, attribute = name.partition(':')
    function = getattr(importlib.import_module(module), attribute)
    text = inspect.getdoc(function) or ''
    description = ' '.join(_SECTION.split(text)[0].split())
    if not description:
        return f'{attribute} has no docstring, which describes it to the model'
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError, NameError) as error:
        return f'the type hints of {attribute} cannot be read: {error}'
    described = _descriptions(text)
    properties, required = {}, []
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return f'the parameter {parameter} of {attribute} cannot be given by name'
        if key not in hints:
            return f'the parameter {key!r} of {attribute} has no type hint, e.g. {key}: str'
        schema = type_schema(hints[key])
        if schema is None:
            return f'the parameter {key!r} of {attribute} has the type {hints[key]}, which JSON does not have'
        properties[key] = schema | ({'description': described[key]} if key in described else {})
        if parameter.default is parameter.empty:
            required.append(key)
    return {
        'type': 'function',
        'function': {
            'name': attribute,
            'description': description,
            'parameters': {'type': 'object', 'properties': properties, 'required': required},
        },
    }


def type_schema(hint: Any) -> dict[str, Any] | None:
    """Returns the JSON schema of a type hint; None if JSON has no such type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint is type(None):
        return {'type': 'null'}
    if hint in TYPES:
        return {'type': TYPES[hint]}
    if origin is typing.Literal:
        return {'enum': list(arguments)}
    if origin in (typing.Union, types.UnionType):
        choices = [type_schema(argument) for argument in arguments]
        return None if None in choices else {'anyOf': choices}
    if origin in (list, dict) and (inner := type_schema(arguments[-1])) is not None:
        if origin is list:
            return {'type': 'array', 'items': inner}
        return {'type': 'object', 'additionalProperties': inner} if arguments[0] is str else None
    return None


def _descriptions(docstring: str) -> dict[str, str]:
    """Returns the description of each argument in the section `Args:` of a docstring."""
    section = _ARGUMENTS.search(f'{docstring}\n')
    found: dict[str, list[str]] = {}
    indent = name = None
    for line in section[1].splitlines() if section else ():
        match = _ARGUMENT.match(line)
        if match and (indent is None or len(match[1]) <= indent):
            indent, name = len(match[1]), match[2]
            found[name] = [match[3]]
        elif name:
            found[name].append(line)
    return {key: ' '.join(' '.join(lines).split()) for key, lines in found.items()}
