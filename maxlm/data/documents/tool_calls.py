"""Tool calls of messages, in the form that chat templates take.

The form is `{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}}`, in which the id is optional.
OpenAI's API writes the arguments as a JSON text. Training and the server convert calls with the functions of this file.
"""

from __future__ import annotations

from typing import Any

from maxlm.storage.json_text import parse_json, to_json

# Beginning of a call that is part of a text, as Hermes and Qwen write it.
CALL_IN_TEXT = '<tool_call>'
# Names of the arguments: those of OpenAI, Llama 3, LangChain and Anthropic.
_ARGUMENTS = ('arguments', 'parameters', 'args', 'input')
# Other fields of a call or a function.
_OTHERS = ('name', 'id', 'type', 'index', 'function', 'description', 'call_id', 'status')
# Number of times that a JSON text may be encoded as a JSON string.
_MAX_ENCODED = 3


def parse_arguments(arguments: Any) -> dict[str, Any]:
    """Returns the arguments of a call as an object. Without arguments (None, an empty text or null), it is empty.

    Args:
        arguments: an object, or a JSON text of an object.

    Raises:
        ValueError: the arguments are not an object, or not JSON. The subject of the message is the call.
    """
    for _ in range(_MAX_ENCODED):
        if not isinstance(arguments, str):
            break
        try:
            arguments = parse_json(arguments) if arguments.strip() else None
        except ValueError as error:
            raise ValueError(f'has arguments that are not JSON ({error}); use a JSON object') from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f'must have an object or a string with a JSON object as arguments, not {_kind(arguments)}')
    try:
        to_json(arguments)
    except ValueError as error:
        raise ValueError(f'has arguments that are not JSON ({error}); use a JSON object') from error
    return arguments


def parse_call(call: Any) -> dict[str, Any]:
    """Returns a call in the form that chat templates take.

    Args:
        call: a call of OpenAI's API, or an object with `name` and `arguments`, or the JSON text of one of them. The
            arguments may have another name of _ARGUMENTS.

    Raises:
        ValueError: the call is malformed. The subject of the message is the call.
    """
    call = _decoded(call)
    function = _decoded(call.get('function', call)) if isinstance(call, dict) else None
    name = function.get('name') if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError('must have a function with a name and arguments, an object or a string with a JSON object')
    identity = {} if call.get('id') is None else {'id': call['id']}
    try:
        to_json([name, identity])
    except ValueError as error:
        raise ValueError(f'has a name or id that is not JSON ({error}); use text') from error
    key = next((key for key in _ARGUMENTS if function.get(key) is not None), 'arguments')
    unknown = [each for each in function if each not in (*_ARGUMENTS, *_OTHERS)]
    if unknown and key not in function:
        # An unknown name of the arguments would make them empty.
        raise ValueError(f"has no 'arguments', but {', '.join(map(repr, unknown))[:200]}; rename or remove it")
    arguments = parse_arguments(function.get(key))
    return {**identity, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def parse_calls(calls: Any) -> list[Any]:
    """Returns a list of calls that are not parsed: the list itself, its JSON text, or a single call; empty for None.

    Raises:
        ValueError: the value is none of them. The subject of the message is the value.
    """
    calls = _decoded(calls)
    if not calls:
        return []
    if not isinstance(calls, list | dict):
        raise ValueError(f'must be a list of calls, not {_kind(calls)}')
    return [calls] if isinstance(calls, dict) else calls


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f'is a text that is not JSON ({error}); use JSON') from error


def _kind(value: Any) -> str:
    return {'str': 'a string', 'list': 'a list', 'int': 'a number', 'float': 'a number', 'bool': 'a boolean'}.get(
        type(value).__name__, type(value).__name__
    )
