"""Messages of conversations, in the form that chat templates take.

Records of all formats, prompts of reinforcement learning, and requests to the server and the Python API are converted
by `normalize_message`. The same message therefore gives the same tokens everywhere.

    OpenAI      {"role": "assistant", "content": "…", "tool_calls": […]}, or "function_call" instead of "tool_calls"
    ShareGPT    {"from": "gpt", "value": "…"}; the value of "function_call" is a JSON text of calls

Contents are texts or lists of text parts, and in records also of nanochat's parts with calls of Python. The content of
a tool's message may be any JSON value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.documents.content_parts import split_parts
from maxlm.data.documents.null_fields import without_null_fields
from maxlm.data.documents.tool_calls import CALL_IN_TEXT, parse_call, parse_calls
from maxlm.storage.json_text import parse_json, to_json

Message = Mapping[str, Any]

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Names of roles in the formats of OpenAI and LLaMA-Factory, and in ShareGPT's format and formats derived from it.
_OPENAI = {
    **{role: role for role in ROLES},
    'function': 'tool',
    'observation': 'tool',
    'function_response': 'tool',
    'function_call': 'assistant',
}
SPEAKERS = {
    **_OPENAI,
    'human': 'user',
    'gpt': 'assistant',
    'chatgpt': 'assistant',
    'bing': 'assistant',
    'bard': 'assistant',
    'model': 'assistant',
}
# Remedy for other names of roles, in error messages.
RENAMING = 'or map other names with maxlm prepare --roles'
# Keys of tool calls in OpenAI's format.
CALLS, OLD_CALL = 'tool_calls', 'function_call'
# Fields that are 0 or false if the loss does not cover a message: those of OpenAI, ms-swift and Axolotl.
WEIGHT = 'weight'
_WEIGHTS = (WEIGHT, 'loss', 'train', 'training')
# Names of the reasoning of a message. Templates read the first two, so Transformers sets both.
_REASONINGS = ('reasoning_content', 'thinking', 'reasoning')
# Reasoning before a call in LLaMA-Factory's format.
_REASONING = re.compile(r'\s*(<think>.*?</think>)\s*', re.DOTALL)


class MessageError(ValueError):
    """A malformed field of a message.

    Attributes:
        field: the field, such as `content` or `tool_calls[0]`.
        problem: the rest of a sentence whose subject is the field.
        of_message: the subject is the message instead.
    """

    def __init__(self, field: str, problem: str, *, of_message: bool = False):
        super().__init__(f'{field!r} {problem}')
        self.field, self.problem, self.of_message = field, problem, of_message

    def located(self, message: str) -> str:
        """Returns the error with the name of the message."""
        return f'{message} {self.problem}' if self.of_message else f'the {self.field!r} of {message} {self.problem}'


def normalize_message(message: Message) -> dict[str, Any]:
    """Returns a message with `role`, one of ROLES, `content`, a text, its `tool_calls`, and its other fields.

    Fields that are null are dropped; see `without_null_fields`.

    Raises:
        MessageError: a field is malformed.
    """
    fields = without_null_fields(message)
    is_sharegpt = 'role' not in fields and 'from' in fields
    role_key, content_key = ('from', 'value') if is_sharegpt else ('role', 'content')
    roles = SPEAKERS if is_sharegpt else _OPENAI
    name, content = fields.pop(role_key, None), fields.pop(content_key, None)
    if not isinstance(name, str) or name not in roles:
        names = ', '.join(SPEAKERS if is_sharegpt else ROLES)
        verb = "is 'from'" if is_sharegpt else 'has the role'
        raise MessageError(role_key, f'{verb} {repr(name)[:200]}; use one of {names}, {RENAMING}', of_message=True)
    role = roles[name]
    calls = _calls(fields)
    if name == OLD_CALL and not calls:
        content, calls = _calls_in_content(content, content_key)
    if content is None and calls:
        content = ''
    fields |= _weight(fields)
    text = _text(content, content_key, is_result=role == 'tool')
    reasoning = next((fields[key] for key in _REASONINGS if key in fields), None)
    if reasoning is not None:
        fields = {'thinking': reasoning, **fields, 'reasoning_content': reasoning}
    return {**fields, 'role': role, 'content': text, **({CALLS: calls} if calls else {})}


def parse_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """Returns messages in the form of `normalize_message`.

    Args:
        value: a list of messages, or its JSON text.
        key: key of the messages in error messages.

    Raises:
        ValueError: a message is malformed. The error names the message and is one line.
    """
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(_list(value, key)):
        try:
            messages += map(normalize_message, split_parts(message))
        except MessageError as error:
            raise ValueError(error.located(f'message {place} of {key!r}')) from error
    return messages


def text_or_messages(value: Any) -> Any:
    """Returns the messages that a text contains as JSON, in a list; other texts and values are unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ('[', '{'):
        return value
    try:
        parsed = parse_json(value)
    except ValueError:
        return value
    messages = parsed if isinstance(parsed, list) else [parsed]
    return messages if messages and all(map(_is_message, messages)) else value


def message_text(message: Message) -> str:
    """Returns the content of a normalized message and the text of its calls, without the role."""
    calls = (to_json(call['function']) for call in message.get(CALLS, ()))
    return '\n\n'.join([message['content'], *calls])


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if 'from' in value and 'role' not in value:
        return value['from'] in list(SPEAKERS) and 'value' in value
    return value.get('role') in list(_OPENAI) and any(key in value for key in ('content', CALLS, OLD_CALL))


def _list(value: Any, key: str) -> Sequence[Message]:
    found = text_or_messages(value)
    if isinstance(found, str):
        try:
            found = parse_json(found)
        except ValueError as error:
            raise ValueError(f'{key!r} must be a list of objects, or the JSON text of one: {error}') from error
    if not isinstance(found, list | tuple):
        raise ValueError(f'{key!r} must be a list of objects, or the JSON text of one')
    # Columns of the type `Json` of Hugging Face datasets contain one JSON text for each message.
    messages = [one for item in found for one in _as_list(text_or_messages(item))]
    if not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f'{key!r} must be a list of objects, or the JSON text of one')
    return messages


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _weight(fields: dict[str, Any]) -> dict[str, int]:
    """Removes the fields of _WEIGHTS from a message, and returns the weight that they give it; empty without them."""
    weights = {key: fields.pop(key) for key in _WEIGHTS if key in fields}
    for key, value in weights.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            problem = f'has {key} {repr(value)[:200]}; use 1 to train on it, or 0 to exclude it'
            other = '' if key == WEIGHT else ', or rename the field if it has another meaning'
            raise MessageError(key, problem + other, of_message=True)
    return {WEIGHT: int(all(weights.values()))} if weights else {}


def _calls(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Removes the calls from the fields of a message and returns them in the form that chat templates take."""
    values = {key: fields.pop(key, None) for key in (CALLS, OLD_CALL)}
    found: dict[str, list[dict[str, Any]]] = {}
    for key, value in values.items():
        place = key
        try:
            calls = parse_calls(value)
            for index, call in enumerate(calls):
                place = f'{key}[{index}]' if key == CALLS else key
                found.setdefault(key, []).append(parse_call(call))
        except ValueError as error:
            raise MessageError(place, str(error)) from error
    if len(found) > 1:
        raise MessageError(OLD_CALL, f'is given in addition to {CALLS!r}; remove one of them')
    return next(iter(found.values()), [])


def _calls_in_content(content: Any, key: str) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the remaining content, and the calls that are the content of a message of `function_call`."""
    if isinstance(content, str) and CALL_IN_TEXT in content:
        return content, []
    reasoning = _REASONING.match(content) if isinstance(content, str) else None
    try:
        calls = [parse_call(call) for call in parse_calls(content[reasoning.end() :] if reasoning else content)]
    except ValueError as error:
        raise MessageError(key, f'must be a call or calls as JSON, which {error}') from error
    return reasoning.group(1) if reasoning else '', calls


def _text(content: Any, key: str, *, is_result: bool) -> str:
    """Returns a content as text: the joined parts of a list of text parts, or the JSON text of a tool's result."""
    if isinstance(content, str):
        return content
    if content is None:
        raise MessageError(key, 'is missing; add it; it must be a string or a list of parts of type text')
    if is_result and not (isinstance(content, list) and content and all(map(_is_part, content))):
        try:
            return to_json(content)
        except ValueError as error:
            raise MessageError(key, f'is not JSON: {error}') from error
    if not isinstance(content, list):
        kind = type(content).__name__
        raise MessageError(key, f'must be text, not {kind}; use a string or a list of parts of type text')
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get('type') == 'text' and isinstance(part.get('text'), str)):
            found = repr(part.get('type'))[:50] if isinstance(part, dict) else 'none'
            raise MessageError(
                f'{key}[{index}]', f'must be {{"type": "text", "text": "…"}}; found type {found}; remove other parts'
            )
    return ''.join(part['text'] for part in content)


def _is_part(value: Any) -> bool:
    """Returns True for a part of a content in OpenAI's format: `{"type": "text", "text": …}`, or of another type."""
    return isinstance(value, dict) and isinstance(value.get('type'), str) and value['type'] in value
