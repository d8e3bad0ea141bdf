"""Conversations, and parsers of their record formats.

    OpenAI    {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}
    ShareGPT  {"conversations": [{"from": "human", "value": "…"}, …], "system": "…"}
    Alpaca    {"instruction": "…", "input": "…", "output": "…", "system": "…"}
    TRL       {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}, or both texts

`tools`, `input` and `system` are optional. A message in OpenAI's format may have other keys, such as `tool_calls`,
which are passed to the chat template. `"weight": 0` excludes a message of the assistant from the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Roles of the speakers in ShareGPT's format and formats derived from it.
SPEAKERS = {
    **{role: role for role in ROLES},
    'human': 'user',
    'gpt': 'assistant',
    'chatgpt': 'assistant',
    'bing': 'assistant',
    'bard': 'assistant',
    'model': 'assistant',
    'function_call': 'assistant',
    'function_response': 'tool',
    'function': 'tool',
    'observation': 'tool',
}
# Remedy for other names of roles, in error messages.
RENAMING = 'or map other names with maxlm prepare --roles'
# Description of a conversation in error messages.
FORMATS = (
    '"messages" of "role" and "content", "conversations" of "from" and "value", "instruction" and "output", or '
    '"prompt" and "completion"'
)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A sequence of messages with roles.

    Attributes:
        messages: JSON objects with `role`, one of ROLES, `content`, a text, and the other keys of the record.
        learned: for each message, whether the loss covers it; only messages of the assistant may be True.
        tools: JSON descriptions of the tools that the assistant may call; empty = no tools.
    """

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """Contents of the messages without roles. Deduplication and tokenizer training use this text."""
        return '\n\n'.join(message['content'] for message in self.messages)


def has_format(entry: Any) -> bool:
    """Returns True if a record has the keys of one of the formats."""
    return isinstance(entry, dict) and any(all(key in entry for key in keys) for keys, _ in _PARSERS)


def parse_conversation(entry: Any) -> Conversation | None:
    """Returns the conversation of a record; None if the record has none of the formats.

    Raises:
        ValueError: the conversation is malformed. The message is one line and does not include the record.
    """
    if not has_format(entry):
        return None
    parse = next(parse for keys, parse in _PARSERS if all(key in entry for key in keys))
    messages = parse(entry)
    if parse is not _openai:
        messages = [*system_of(entry), *messages]
    # The loss covers only the completion.
    prompt = len(messages) - len(_to_messages(entry, 'completion', 'assistant')) if parse is _prompt_completion else 0
    return make_conversation(messages, entry, prompt=prompt)


def has_completion(entry: Any) -> bool:
    """Returns True if a record is a prompt and a completion that are both texts."""
    if not has_format(entry) or any(key in entry for keys, _ in _PARSERS[:-1] for key in keys[:1]):
        return False
    return isinstance(entry['prompt'], str) and isinstance(entry['completion'], str)


def parse_completion(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompt and the completion of a record.

    Raises:
        ValueError: the completion is empty, or is labeled as good or bad.
    """
    _refuse_label(entry)
    if not entry['completion']:
        raise ValueError("'completion' is empty; it must contain text")
    return entry['prompt'], entry['completion']


def make_conversation(messages: Sequence[Message], entry: Mapping[str, Any], *, prompt: int = 0) -> Conversation:
    """Returns the conversation of a record's messages. The loss does not cover the first `prompt` messages.

    Raises:
        ValueError: the loss covers no message, `tools` is not a list, or a content is not valid text.
    """
    learned = tuple(
        place >= prompt and message['role'] == 'assistant' and message.get('weight', 1) != 0
        for place, message in enumerate(messages)
    )
    if not any(learned):
        raise ValueError('no assistant message to train on; add one, or set its weight to 1')
    tools = entry.get('tools') or []
    if not isinstance(tools, list):
        raise ValueError(f"'tools' must be a list, not {type(tools).__name__}")
    shown = tuple({key: value for key, value in message.items() if key != 'weight'} for message in messages)
    conversation = Conversation(shown, learned, tuple(tools))
    try:
        conversation.text.encode()
    except UnicodeEncodeError as error:
        raise ValueError('contains an unpaired surrogate, which is not valid text; remove it') from error
    return conversation


def parse_messages(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the messages at a key of a record, in OpenAI's or ShareGPT's format.

    Raises:
        ValueError: the messages are malformed.
    """
    return (_sharegpt if any('from' in message for message in _list(entry, key)) else _openai)(entry, key)


def system_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the system message of a record in a list; empty if the record has none."""
    return [{'role': 'system', 'content': _text(entry['system'], 'system')}] if entry.get('system') else []


def _openai(entry: Mapping[str, Any], key: str = 'messages') -> list[dict[str, Any]]:
    messages = []
    for place, message in enumerate(_list(entry, key)):
        label = f'message {place} of {key!r}'
        role = message.get('role')
        role = 'tool' if role == 'function' else role
        if role not in ROLES:
            raise ValueError(f'{label} has the role {repr(role)[:200]}; use one of {", ".join(ROLES)}, {RENAMING}')
        content = message.get('content')
        if content is None and (message.get('tool_calls') or message.get('function_call')):
            content = ''
        if message.get('weight', 1) not in (0, 1):
            raise ValueError(
                f'{label} has weight {repr(message["weight"])[:200]}; use 1 to train on it, or 0 to exclude it'
            )
        messages.append({**message, 'role': role, 'content': _text(content, f"the 'content' of {label}")})
    return messages


def _sharegpt(entry: Mapping[str, Any], key: str = 'conversations') -> list[dict[str, Any]]:
    messages = []
    for place, message in enumerate(_list(entry, key)):
        label = f'message {place} of {key!r}'
        speaker = message.get('from')
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise ValueError(f"{label} is 'from' {repr(speaker)[:200]}; use one of {', '.join(SPEAKERS)}, {RENAMING}")
        messages.append({'role': SPEAKERS[speaker], 'content': _text(message.get('value'), f"the 'value' of {label}")})
    return messages


def _alpaca(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    instruction, output = (_text(entry[key], f'{key!r}') for key in ('instruction', 'output'))
    context = _text(entry.get('input') or '', "'input'")
    asked = f'{instruction}\n\n{context}' if context else instruction
    return [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': output}]


def _prompt_completion(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    _refuse_label(entry)
    prompt, completion = _to_messages(entry, 'prompt', 'user'), _to_messages(entry, 'completion', 'assistant')
    if not completion or completion[0]['role'] != 'assistant':
        raise ValueError("'completion' must begin with a message of the assistant")
    return [*prompt, *completion]


def _to_messages(entry: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    """Converts a text, a message or a list of messages to a list of messages."""
    value = entry[key]
    if isinstance(value, str):
        return [{'role': role, 'content': value}]
    return parse_messages({key: [value] if isinstance(value, dict) else value}, key)


def _refuse_label(entry: Mapping[str, Any]) -> None:
    if isinstance(entry.get('label'), bool):
        raise ValueError(
            "'label' marks completions as good or bad, and bad completions must not be imitated; use "
            '--format=preference and train with dpo.loss_type=kto, or remove them'
        )


# Keys that identify a format, and its parser.
_PARSERS: Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[dict[str, Any]]]]] = (
    (('messages',), _openai),
    (('conversations',), _sharegpt),
    (('instruction', 'output'), _alpaca),
    (('prompt', 'completion'), _prompt_completion),
)


def _list(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    messages = entry[key]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'{key!r} must be a list of objects')
    return messages


def _text(content: Any, label: str) -> str:
    """Returns a text, or joins the text parts of a list. OpenAI's format uses such lists for texts and images."""
    if isinstance(content, list):
        parts = [
            part.get('text') if isinstance(part, dict) and part.get('type') == 'text' else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f'{label} has parts that are not text; remove them')
        return ''.join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise ValueError(
            f'{label} is missing; add it' if content is None else f'{label} must be text, not {type(content).__name__}'
        )
    return content
