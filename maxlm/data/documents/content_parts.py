"""Contents of assistants with calls of Python and their results, in the form of nanochat's conversations.

{"role": "assistant", "content": [{"type": "text", "text": "6 × 7 is "}, {"type": "python", "text": "6*7"},
                                  {"type": "python_output", "text": "42"}, {"type": "text", "text": "42."}]}
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

PYTHON, OUTPUT = 'python', 'python_output'


def split_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the messages of a message with parts of the types `python` and `python_output`.

    Each part `python` becomes a tool call of the function `python` with the argument `code`, and `python_output` the
    message of a tool. The last message is an assistant's without calls, because the parts are a complete turn. Texts in
    a row are joined. Other messages are returned unchanged, and so are malformed parts and results that do not follow a
    call, which `normalize_message` refuses.
    """
    parts = message.get('content')
    if message.get('role') != 'assistant' or not isinstance(parts, list) or not all(map(_is_part, parts)):
        return [message]
    kinds = [part['type'] for part in parts]
    follows = all(kind != OUTPUT or before in (PYTHON, OUTPUT) for before, kind in itertools.pairwise(['', *kinds]))
    if PYTHON not in kinds or not follows:
        return [message]
    rest = {key: value for key, value in message.items() if key != 'content'}
    messages: list[Mapping[str, Any]] = []
    text = ''
    for part in parts:
        if part['type'] == 'text':
            text += part['text']
            continue
        if part['type'] == PYTHON:
            call = {'type': 'function', 'function': {'name': PYTHON, 'arguments': {'code': part['text']}}}
            messages.append({**rest, 'content': text, 'tool_calls': [call]})
            text = ''
        else:
            messages.append({'role': 'tool', 'name': PYTHON, 'content': part['text']})
    return [*messages, {**rest, 'content': text}]


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping) and part.get('type') in ('text', PYTHON, OUTPUT) and isinstance(part.get('text'), str)
    )
