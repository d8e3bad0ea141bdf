"""Invisible marks in the data of a chat template, which show where its output contains each message.

A mark consists of noncharacters of Unicode. It is inserted inside of the whitespace around a text, so that templates
that strip a text keep the mark.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.data.chat.rendered import ChatError
from maxlm.data.documents.messages import Message

# First character of each mark. It is escaped in the data, so all marks in an output were added here.
MARK = '\ufdd0'
# Kinds: start and end of a content, end of the name of a tool call, and start and end of a `{% generation %}` block.
OPEN, CLOSE, NAME, GENERATION, END_GENERATION = '\ufdd1', '\ufdd2', '\ufdd3', '\ufdd4', '\ufdd5'
_STOP = '\ufdd6'
_DIGITS = [chr(0xFDE0 + digit) for digit in range(16)]
_PATTERN = re.compile(f'{MARK}([{OPEN}-{END_GENERATION}])([{_DIGITS[0]}-{_DIGITS[-1]}]*){_STOP}')
# Member of a set of marks: empty contents of messages without tool calls are marked too.
_EMPTY = ''
# Sets of marks, most first. A template that tests the start of a content, or its length, needs a later one.
MARKINGS = ((OPEN, CLOSE, NAME, _EMPTY), (OPEN, CLOSE, NAME), (CLOSE, NAME), (CLOSE,))


class TextMark(NamedTuple):
    """A mark in an output.

    Attributes:
        place: position in the output without marks.
        kind: OPEN, CLOSE, NAME, GENERATION or END_GENERATION.
        owner: index of the message; -1 for blocks.
    """

    place: int
    kind: str
    owner: int


class MarkedText(NamedTuple):
    """An output without its marks, and the marks in ascending order of their positions."""

    text: str
    marks: tuple[TextMark, ...]

    def blocks(self) -> list[tuple[int, int]]:
        """Returns start and end of each `{% generation %}` block. Raises ChatError if blocks overlap."""
        marks = [mark for mark in self.marks if mark.owner < 0]
        if [mark.kind for mark in marks] != [GENERATION, END_GENERATION] * (len(marks) // 2):
            raise ChatError('the chat template nests {% generation %} blocks or changes their text; put them apart')
        places = [mark.place for mark in marks]
        return list(zip(places[::2], places[1::2], strict=True))


def mark(kind: str, owner: int = -1) -> str:
    """Returns the text of a mark."""
    return f'{MARK}{kind}{"".join(_DIGITS[int(digit, 16)] for digit in f"{owner:x}") if owner >= 0 else ""}{_STOP}'


def mark_messages(messages: Sequence[Message], kinds: Sequence[str]) -> list[Message]:
    """Returns the messages with marks of `kinds`, one of MARKINGS."""
    return [_mark_message(message, owner, kinds) for owner, message in enumerate(messages)]


def read_marks(output: str) -> MarkedText:
    """Removes the marks from an output."""
    parts, marks, place, length = [], [], 0, 0
    for found in _PATTERN.finditer(output):
        parts.append(output[place : found.start()])
        length += found.start() - place
        place = found.end()
        digits = ''.join(f'{_DIGITS.index(digit):x}' for digit in found[2])
        marks.append(TextMark(length, found[1], int(digits, 16) if digits else -1))
    return MarkedText(''.join([*parts, output[place:]]), tuple(marks))


class ContentSpans:
    """Positions of the contents of messages in an output."""

    def __init__(self, marks: Sequence[TextMark]):
        opened: dict[int, int] = {}
        spans = []
        for place, kind, owner in marks:
            if kind == OPEN:
                opened[owner] = place
            elif kind == CLOSE:
                spans.append((opened.get(owner, place - 1), place, owner))
        self._spans = spans
        self._stops = [stop for _, stop, _ in spans]
        # The smallest start of each span and all spans after it ends the search in `messages_in`.
        self._next_starts = [*itertools.accumulate((start for start, _, _ in reversed(spans)), min)][::-1]

    def messages_in(self, start: int, stop: int) -> set[int]:
        """Returns the indices of the messages whose contents have a part in the positions [start, stop)."""
        first = bisect.bisect_right(self._stops, start)
        last = next((i for i in range(first, len(self._spans)) if self._next_starts[i] >= stop), len(self._spans))
        return {owner for begin, _, owner in self._spans[first:last] if begin < stop}


def _mark_message(message: Message, owner: int, kinds: Sequence[str]) -> Message:
    marked = dict(message)
    content, calls = message.get('content'), message.get('tool_calls')
    is_marked = _EMPTY in kinds and not calls
    if isinstance(content, str) and ((core := content.strip()) or is_marked):
        before = mark(OPEN, owner) if OPEN in kinds else ''
        start = content.index(core)
        marked['content'] = f'{content[:start]}{before}{core}{mark(CLOSE, owner)}{content[start + len(core) :]}'
    if NAME in kinds and isinstance(calls, Sequence) and not isinstance(calls, str):
        marked['tool_calls'] = [_mark_call(call, owner) for call in calls]
    return marked


def _mark_call(call: Any, owner: int) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get('name'), str):
        return {**call, 'name': call['name'] + mark(NAME, owner)}
    return {**call, 'function': _mark_call(call['function'], owner)} if 'function' in call else call
