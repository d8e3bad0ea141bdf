"""Descriptions of tools in records and requests, in the form that chat templates take.

The form is `{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}`. A list of tools, a
tool, and the parameters of a tool may also be JSON texts, because columns of Arrow cannot contain objects with
different fields. A bare function (OpenAI's older `functions`, LLaMA-Factory) is a tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxlm.data.documents.null_fields import without_null_fields
from maxlm.storage.json_text import parse_json, to_json

# Keys of the tools of a record, and of OpenAI's older format.
TOOLS, FUNCTIONS = 'tools', 'functions'
# Order of the first keys of a function.
_FIRST = ('name', 'description', 'parameters')


def tools_of(entry: Mapping[str, Any]) -> list[Any]:
    """Returns the tools of a record, or those of OpenAI's older format if it has no others.

    Raises:
        ValueError: see `parse_tools`.
    """
    return parse_tools(entry.get(TOOLS), TOOLS) or parse_tools(entry.get(FUNCTIONS), FUNCTIONS)


def parse_tools(tools: Any, key: str = TOOLS) -> list[Any]:
    """Returns tools in the form that chat templates take; empty for None.

    Args:
        tools: a list, or a JSON text of a list.
        key: key of the tools in error messages.

    Raises:
        ValueError: `tools` is not a list of objects, or contains a value that is not JSON.
    """
    if isinstance(tools, str):
        tools = parse_field(tools, key) if tools.strip() else None
    else:
        tools = without_null_fields(tools)
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ValueError(f'{key!r} must be a list, not {type(tools).__name__}')
    return [_tool(tool, f'{key}[{place}]') for place, tool in enumerate(tools)]


def parse_field(text: str, label: str) -> Any:
    """Returns the value of a field that contains a JSON text. Raises ValueError, which names the field by `label`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f'{label!r} is a text that is not JSON ({error}); use JSON') from error


def _tool(tool: Any, label: str) -> Any:
    # Columns of the type `Json` of Hugging Face datasets contain one JSON text for each tool.
    tool = without_null_fields(parse_field(tool, label)) if isinstance(tool, str) else tool
    if not isinstance(tool, dict):
        raise ValueError(f'{label!r} must be an object, not {type(tool).__name__}')
    tool = _wrapped(tool, label)
    try:
        to_json(tool)
    except ValueError as error:
        raise ValueError(f'{label!r} is not JSON: {error}') from error
    return tool


def _wrapped(tool: dict[str, Any], label: str) -> dict[str, Any]:
    """Returns a function in the form that chat templates take; a tool of another kind is unchanged."""
    is_wrapped = 'function' in tool
    if tool.get('type', 'function') != 'function' or not (is_wrapped or 'name' in tool):
        return tool
    rest = {key: value for key, value in tool.items() if key not in ('type', 'function')}
    function = _object(tool['function'], f'{label}.function') if is_wrapped else rest
    function = {key: function[key] for key in sorted(function, key=_rank)}
    if parameters := function.get('parameters'):
        place = f'{label}.function.parameters'
        parameters = _object(parameters, place)
        if isinstance(properties := parameters.get('properties'), str):
            parameters = {**parameters, 'properties': _object(properties, f'{place}.properties')}
        function['parameters'] = parameters
    elif isinstance(parameters, str):
        del function['parameters']
    return {'type': 'function', 'function': function, **(rest if is_wrapped else {})}


def _object(value: Any, label: str) -> dict[str, Any]:
    found = parse_field(value, label) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError(f'{label!r} must be an object, not {type(found).__name__}')
    return found


def _rank(key: str) -> int:
    return _FIRST.index(key) if key in _FIRST else len(_FIRST)
