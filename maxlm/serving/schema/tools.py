"""Tools of chat requests: functions that the model may call instead of, or in addition to, an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field

from maxlm.data.documents.tools import parse_tools
from maxlm.errors import InputError
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.json_schemas import MAX_SCHEMA_CHARACTERS, without_unknown_formats
from maxlm.inference.tool_calls import call_grammar
from maxlm.serving.schema.base import RequestObject
from maxlm.serving.schema.errors import ApiError

MAX_TOOLS = 128
_NAME = re.compile(r'[a-zA-Z0-9_-]{1,64}')
# Schema of the arguments of a function without a schema.
_NO_ARGUMENTS: dict[str, Any] = {'type': 'object', 'properties': {}, 'additionalProperties': False}
CHOICES = ('none', 'auto', 'required')
CHOICE_SCHEMA: dict[str, Any] = {
    'anyOf': [
        {'enum': [*CHOICES, None]},
        {
            'type': 'object',
            'properties': {
                'type': {'const': 'function'},
                'function': {'type': 'object', 'properties': {'name': {'type': 'string'}}, 'required': ['name']},
            },
            'required': ['type', 'function'],
        },
    ]
}


class Function(RequestObject):
    """A function that the model may call."""

    name: str = Field(description='Name: up to 64 letters, digits, underscores and hyphens.')
    description: str | None = Field(None, description='Description for the model.')
    parameters: dict[str, Any] | None = Field(None, description='JSON schema of the arguments, an object.')
    strict: bool | None = Field(None, description='The schema is followed with and without this option.')


class Tool(RequestObject):
    """A tool that the model may use."""

    type: str = Field(description='function')
    function: Function = Field(description='The function.')


class CallOptions(NamedTuple):
    """Tool calls that a response may contain.

    Attributes:
        tools: tools that the prompt shows, as JSON.
        grammar: grammar of the response.
        is_required: the response consists of calls only.
        parts: grammar of the arguments of each function, by the name of the parameter.
    """

    tools: list[dict[str, Any]]
    grammar: str
    is_required: bool
    parts: dict[str, str]


def call_options(tools: Sequence[Tool] | None, choice: Any, parallel: bool | None) -> CallOptions | None:
    """Returns the tool calls that a response may contain, or None if it may contain none.

    Args:
        tools: parameter `tools`.
        choice: parameter `tool_choice`.
        parallel: parameter `parallel_tool_calls`.

    Raises:
        ApiError: a parameter is invalid.
    """
    names = _names(tools or ())
    named = None
    if isinstance(choice, dict):
        function = choice.get('function')
        named = function.get('name') if isinstance(function, dict) else None
        if choice.get('type') != 'function' or not isinstance(named, str) or named not in names:
            raise ApiError(
                400, 'tool_choice: must name a function of tools, or be none, auto or required', param='tool_choice'
            )
    elif choice is not None and choice not in CHOICES:
        raise ApiError(
            400,
            'tool_choice: must be none, auto, required or {"type": "function", "function": {"name": "…"}}',
            param='tool_choice',
        )
    if not names:
        if choice == 'required':
            raise ApiError(400, 'tool_choice=required: requires tools', param='tool_choice')
        return None
    if choice == 'none':
        return None
    try:
        shown = parse_tools([tool.model_dump(exclude_none=True) for tool in tools or ()])
    except ValueError as error:
        raise ApiError(400, str(error), param='tools') from error
    schemas = {tool['function']['name']: tool['function'].get('parameters', _NO_ARGUMENTS) for tool in shown}
    is_required = choice == 'required' or named is not None
    parts: dict[str, str] = {}
    for index, (name, schema) in enumerate(schemas.items()):
        param = f'tools[{index}].function.parameters'
        try:
            parts |= {param: json_grammar(schema, param)} if named in (None, name) else {}
        except InputError as error:
            raise ApiError(400, str(error), param=param) from error
    if sum(map(len, parts.values())) > MAX_SCHEMA_CHARACTERS:
        raise ApiError(
            400, f'tools: all parameters together have more than {MAX_SCHEMA_CHARACTERS} characters', param='tools'
        )
    grammar = call_grammar(
        {name: without_unknown_formats(schemas[name]) for name in (schemas if named is None else [named])},
        is_required=is_required,
        is_single=parallel is False or named is not None,
    )
    return CallOptions(shown, grammar, is_required, parts)


def _names(tools: Sequence[Tool]) -> set[str]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        param = f'tools[{index}]'
        if tool.type != 'function':
            raise ApiError(400, f'{param}.type={tool.type[:50]!r}: must be function', param=f'{param}.type')
        name = tool.function.name
        if not _NAME.fullmatch(name) or name in names:
            raise ApiError(
                400,
                f'{param}.function.name={name[:80]!r}: must be a new name of up to 64 letters, digits, _ and -',
                param=f'{param}.function.name',
            )
        names.add(name)
    return names
