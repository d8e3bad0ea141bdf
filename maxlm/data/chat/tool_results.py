"""Encodes the results of tools, and other messages after a turn, as the continuation of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.documents.messages import Message

# Some templates require ids of nine letters and digits.
CALL_ID = 'call{:05}'


def encode_tool_results(
    encoder: ChatEncoder,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    results: Sequence[str],
    tools: Sequence[Any] = (),
) -> np.ndarray:
    """Returns the token ids between an assistant turn with tool calls and the next one, see `encode_replies`.

    Args:
        encoder: encoder of the conversation.
        calls: name and arguments of each call of the turn.
        results: text of the result of each call.
        tools: tools of the conversation.

    Raises:
        ChatError: the template rejects messages with the role `tool`, or changes earlier messages because of them.
    """
    turn: Message = {
        'role': 'assistant',
        'content': '',
        'tool_calls': [
            {'id': CALL_ID.format(index), 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }
    messages: list[Message] = [
        {'role': 'tool', 'name': name, 'tool_call_id': CALL_ID.format(index), 'content': result}
        for index, ((name, _), result) in enumerate(zip(calls, results, strict=True))
    ]
    return encode_replies(encoder, turn, messages, tools)


def encode_replies(
    encoder: ChatEncoder, turn: Message, messages: Sequence[Message], tools: Sequence[Any] = ()
) -> np.ndarray:
    """Returns the token ids between an assistant turn and the next one: uint32 [number].

    They follow the token that ends the turn, and end with the generation prompt. The tokens of the turn itself are not
    encoded again, because another encoding than that of the model may exist.

    Args:
        encoder: encoder of the conversation.
        turn: the assistant turn. Only its calls of tools matter.
        messages: messages between the turns.
        tools: tools of the conversation.

    Raises:
        ChatError: the template rejects the messages, or changes earlier messages because of them.
    """
    begin: list[Message] = [{'role': 'user', 'content': '?'}, turn]
    before = encoder.encode_rendered(encoder.render_prompt(begin, tools=tools, add_generation_prompt=False))
    # The template may add text, such as a line break, after the turn.
    ends = np.flatnonzero(before == encoder.end_of_turn)
    if len(ends) <= np.count_nonzero(encoder.encode_prompt(begin[:1], tools=tools) == encoder.end_of_turn):
        raise ChatError('the chat template ends turns with tool calls by another token than other turns')
    num = int(ends[-1]) + 1 if len(ends) else 0
    after = encoder.encode_prompt([*begin, *messages], tools=tools)
    if not num or not np.array_equal(after[:num], before[:num]):
        raise ChatError('the chat template changes earlier messages after a tool result or message')
    return after[num:]
