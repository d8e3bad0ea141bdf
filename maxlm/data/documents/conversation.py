"""Conversations, and parsers of their record formats.

    OpenAI    {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}
    ShareGPT  {"conversations": [{"from": "human", "value": "…"}, …], "system": "…"}
    Alpaca    {"instruction": "…", "input": "…", "output": "…", "system": "…", "history": [["…", "…"], …]}
    TRL       {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}, or both texts

`tools`, `input`, `system` and `history`, the earlier turns, are optional. `maxlm.data.documents.messages` describes the
formats of messages. Their other keys are passed to the chat template. `"weight": 0` excludes a message of the assistant
from the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxlm.data.documents.label import refuse_label
from maxlm.data.documents.messages import Message, message_text, parse_messages, text_or_messages
from maxlm.data.documents.tools import parse_field, tools_of

# Description of a conversation in error messages.
FORMATS = (
    '"messages" of "role" and "content", "conversations" of "from" and "value", "instruction" and "output", or '
    '"prompt" and "completion"'
)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A sequence of messages with roles.

    Attributes:
        messages: messages in the form of `normalize_message`.
        learned: for each message, whether the loss covers it; only messages of the assistant may be True.
        tools: JSON descriptions of the tools that the assistant may call; empty = no tools.
    """

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """Contents and tool calls without roles. Deduplication and tokenizer training use this text."""
        return '\n\n'.join(map(message_text, self.messages))


def has_format(entry: Any) -> bool:
    """Returns True if a record has the keys of one of the formats."""
    return isinstance(entry, dict) and any(all(key in entry for key in keys) for keys, _ in _PARSERS)


def parse_conversation(entry: Any) -> Conversation | None:
    """Returns the conversation of a record; None if the record has none of the formats.

    Raises:
        ValueError: the conversation is malformed, or is labeled as good or bad. The message is one line and does not
            include the record.
    """
    if not has_format(entry):
        return None
    refuse_label(entry)
    messages, prompt = record_messages(entry)
    return make_conversation(messages, entry, prompt=prompt)


def record_messages(entry: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages of a record, and the number of messages that the loss does not cover.

    Args:
        entry: a record for which `has_format` is True.

    Raises:
        ValueError: a message is malformed.
    """
    parse = next(parse for keys, parse in _PARSERS if all(key in entry for key in keys))
    messages = parse(entry)
    if parse is not _openai:
        messages = [*system_of(entry), *messages]
    # The loss covers only the completion.
    prompt = len(messages) - len(_to_messages(entry, 'completion', 'assistant')) if parse is _prompt_completion else 0
    return messages, prompt


def has_completion(entry: Any) -> bool:
    """Returns True if a record is a prompt and a completion that are both texts."""
    if not has_format(entry) or any(key in entry for keys, _ in _PARSERS[:-1] for key in keys[:1]):
        return False
    return all(isinstance(text_or_messages(entry[key]), str) for key in ('prompt', 'completion'))


def parse_completion(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompt and the completion of a record.

    Raises:
        ValueError: the completion is empty, or is labeled as good or bad.
    """
    refuse_label(entry)
    if not entry['completion']:
        raise ValueError("'completion' is empty; it must contain text")
    return entry['prompt'], entry['completion']


def make_conversation(messages: Sequence[Message], entry: Mapping[str, Any], *, prompt: int = 0) -> Conversation:
    """Returns the conversation of a record's messages. The loss does not cover the first `prompt` messages.

    Raises:
        ValueError: the loss covers no message, the tools are malformed, or a content is not valid text.
    """
    learned = tuple(
        place >= prompt and message['role'] == 'assistant' and message.get('weight', 1) != 0
        for place, message in enumerate(messages)
    )
    if not any(learned):
        raise ValueError('no assistant message to train on; add one, or set its weight to 1')
    shown = tuple({key: value for key, value in message.items() if key != 'weight'} for message in messages)
    conversation = Conversation(shown, learned, tuple(tools_of(entry)))
    try:
        conversation.text.encode()
    except UnicodeEncodeError as error:
        raise ValueError('contains an unpaired surrogate, which is not valid text; remove it') from error
    return conversation


def system_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the system message of a record in a list; empty if the record has none."""
    return [{'role': 'system', 'content': _text(entry['system'], 'system')}] if entry.get('system') else []


def history_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of the earlier turns of an Alpaca record: pairs of an instruction and its answer."""
    history = entry.get('history') or []
    if isinstance(history, str):
        history = parse_field(history, 'history')
    is_valid = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    )
    if not is_valid:
        raise ValueError("'history' must be a list of pairs of an instruction and an answer; rename or remove it")
    return [
        {'role': role, 'content': text}
        for pair in history
        for role, text in zip(('user', 'assistant'), pair, strict=True)
    ]


def _openai(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return parse_messages(entry['messages'], 'messages')


def _sharegpt(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return parse_messages(entry['conversations'], 'conversations')


def _alpaca(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    instruction, output = (_text(entry[key], f'{key!r}') for key in ('instruction', 'output'))
    context = _text(entry.get('input') or '', "'input'")
    question = f'{instruction}\n\n{context}' if context else instruction
    return [*history_of(entry), {'role': 'user', 'content': question}, {'role': 'assistant', 'content': output}]


def _prompt_completion(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt, completion = _to_messages(entry, 'prompt', 'user'), _to_messages(entry, 'completion', 'assistant')
    if not completion or completion[0]['role'] != 'assistant':
        raise ValueError("'completion' must begin with a message of the assistant")
    return [*prompt, *completion]


def _to_messages(entry: Mapping[str, Any], key: str, role: str) -> list[dict[str, Any]]:
    """Converts a text, a message or a list of messages to a list of messages."""
    value = text_or_messages(entry[key])
    if isinstance(value, str):
        return [{'role': role, 'content': value}]
    return parse_messages([value] if isinstance(value, dict) else value, key)


# Keys that identify a format, and its parser.
_PARSERS: Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[dict[str, Any]]]]] = (
    (('messages',), _openai),
    (('conversations',), _sharegpt),
    (('instruction', 'output'), _alpaca),
    (('prompt', 'completion'), _prompt_completion),
)


def _text(content: Any, label: str) -> str:
    if not isinstance(content, str):
        raise ValueError(
            f'{label} is missing; add it' if content is None else f'{label} must be text, not {type(content).__name__}'
        )
    return content
