"""Drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Messages at the beginning of a conversation that are never dropped.
_SYSTEM = ('system', 'developer')


class FittedConversation(NamedTuple):
    """Messages that fit the context, and the number of messages that were dropped."""

    messages: list[Mapping[str, Any]]
    num_dropped: int


def fit_conversation(
    messages: Sequence[Mapping[str, Any]], fits: Callable[[Sequence[Mapping[str, Any]]], bool]
) -> FittedConversation:
    """Returns the longest end of a conversation that fits, after its system prompt.

    A turn is a message of the user and all messages up to the next one. Whole turns are dropped, the oldest first. The
    last turn stays even if it does not fit alone.

    Args:
        messages: messages with a `role`.
        fits: returns True for messages that fit. If it is true for a conversation, it must be true for a later start.

    Examples:
        >>> roles = ['system', 'user', 'assistant', 'user', 'assistant', 'user']
        >>> messages = [{'role': role, 'content': str(number)} for number, role in enumerate(roles)]
        >>> fitted = fit_conversation(messages, lambda kept: len(kept) <= 4)
        >>> [message['content'] for message in fitted.messages], fitted.num_dropped
        (['0', '3', '4', '5'], 2)
    """
    head = next((i for i, message in enumerate(messages) if message['role'] not in _SYSTEM), len(messages))
    starts = [head, *(i for i, message in enumerate(messages) if message['role'] == 'user' and i > head)]

    def kept(number: int) -> list[Mapping[str, Any]]:
        return [*messages[:head], *messages[starts[number] :]]

    first, last = 0, len(starts) - 1
    # A conversation usually fits, so that the first test is the only one.
    middle = first
    while first < last:
        if fits(kept(middle)):
            last = middle
        else:
            first = middle + 1
        middle = (first + last) // 2
    return FittedConversation(kept(first), starts[first] - head)


def answer_length(max_context: int, max_tokens: int | None, limit: int = 0) -> int:
    """Returns the number of tokens that are kept free for an answer when turns are dropped.

    Args:
        max_context: context length.
        max_tokens: maximum number of tokens of the answer; None = the rest of the context, of which a quarter is kept
            free.
        limit: maximum number of tokens of any answer; 0 = none.

    Examples:
        >>> answer_length(256, None), answer_length(256, 100), answer_length(256, None, limit=32)
        (64, 100, 32)
    """
    if max_tokens is not None:
        return max_tokens
    return min(max_context // 4, limit or max_context)
