"""Locates the turns of the assistant in the output of a chat template that does not mark them.

A turn begins after the generation prompt: where the output and the prompt for this turn differ. It ends with the last
special token that follows its message both at the end of a conversation and before the next message. Other tokens
belong to the end of the conversation, or begin the next message.

Templates may strip contents, remove the reasoning of earlier turns, or move texts to the last turn. Therefore marks in
the contents show which positions of two outputs correspond. The output with marks must be the same text.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from maxlm.data.chat.marks import (
    CLOSE,
    MARKINGS,
    NAME,
    OPEN,
    ContentSpans,
    MarkedText,
    TextMark,
    mark_messages,
    read_marks,
)
from maxlm.data.chat.rendered import ChatError, Span
from maxlm.data.documents.messages import Message

NO_END = 'the chat template ends an assistant turn without a special token, so the model would not learn to stop'
_REMEDY = 'put the text of the assistant between {% generation %} and {% endgeneration %}'
_CHANGED = (
    'the chat template renders turns differently once later turns follow, so assistant text cannot be located; '
    + _REMEDY
)


_SOLID = re.compile(r'\S')


class Render(Protocol):
    """Renders messages with the tools of the conversation."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Returns the output. Raises ChatError."""


class _Tail(NamedTuple):
    """An output from the position after its last mark of earlier messages.

    Attributes:
        text: the complete output.
        start: the position.
    """

    text: str
    start: int


class TurnFinder:
    """Locates the turns of one conversation.

    Attributes:
        text: the output for the conversation.
    """

    def __init__(self, messages: Sequence[Message], render: Render, special: re.Pattern[str], usual_end: str = ''):
        """Renders the conversation.

        Args:
            messages: messages of the conversation.
            render: renders messages of this conversation.
            special: matches the special tokens.
            usual_end: text between the content of a turn and the end of the turn, from another conversation.

        Raises:
            ChatError: the template rejects the messages.
        """
        self._render, self._special, self._usual_end = render, special, usual_end
        self.text = read_marks(render(messages)).text
        self._messages, self._marks = mark_visibly(messages, render, self.text)
        self._tokens = [found.span() for found in special.finditer(self.text)]
        self._contents = ContentSpans(self._marks)
        # Positions of the marks of each message, by kind.
        self._places: dict[tuple[int, str], list[int]] = {}
        for place, kind, owner in self._marks:
            self._places.setdefault((owner, kind), []).append(place)
        # Position after the last mark of the messages before each message.
        self._ends = [0]
        for owner in range(len(messages)):
            ends = [*self._of(owner, CLOSE), *self._of(owner, NAME)]
            self._ends.append(max(ends, default=self._ends[-1]))
        # Prompt after a message of each role, for the next turn.
        self._prompts: dict[str, str] = {}

    def find(self) -> list[Span]:
        """Returns the span of each message of the assistant, up to and including the special token at its end.

        Raises:
            ChatError: a turn cannot be located.
        """
        spans: list[Span] = []
        for owner, message in enumerate(self._messages):
            if message['role'] == 'assistant':
                start = self._start(owner)
                spans.append(Span(start, self._end(owner, start)))
                self._check(spans, owner)
        return spans

    def usual_end(self, span: Span) -> str:
        """Returns the text, without spaces at its start, from the content in a span to its end; '' if unknown."""
        places = [mark.place for mark in self._marks if mark.kind == CLOSE and span.start <= mark.place <= span.stop]
        return self.text[places[-1] : span.stop].lstrip() if places else ''

    def _start(self, owner: int) -> int:
        here = self._ends[owner]
        # A prompt after a mark does not contain other messages.
        role = self._messages[owner - 1]['role'] if self._is_marked(owner - 1) else ''
        known = self._prompts.get(role) if role else None
        if known is not None and self.text.startswith(known, here):
            return here + len(known)
        before, prompt = self._aligned(owner, self._read(self._messages[:owner], add_generation_prompt=True))
        here = before.start
        expected = prompt.text[prompt.start :]
        num = self._num_common(before, prompt)
        if num == len(expected):
            self._prompts[role] = expected
            return here + num
        # The history does not contain all of the prompt, such as the beginning of the reasoning.
        _, without = self._aligned(owner, self._read(self._messages[:owner]))
        header = self._num_common(prompt, without)
        limit = min((mark.place for mark in self._marks if mark.owner >= owner), default=len(self.text))
        if num <= header:
            # The template adds a text to the last message, or between messages.
            place = self.text.find(expected[header:], here, limit) if self._marks and expected[header:] else -1
            if place >= 0:
                return place + len(expected) - header
            if num < header:
                raise ChatError(_CHANGED)
        opens = self._of(owner, OPEN)
        place = here + num
        if opens and place >= opens[0]:
            return opens[0]
        # Equal first characters of the prompt's rest and of another text do not belong to the header.
        while num > header and not self._is_boundary(here + num):
            num -= 1
        return here + num

    def _end(self, owner: int, start: int) -> int:
        is_last = owner == len(self._messages) - 1
        own = self._of(owner, CLOSE)
        if own and self._usual_end and not self._messages[owner].get('tool_calls'):
            # The content may end with spaces.
            place = _SOLID.search(self.text, own[-1])
            if place is not None and self.text.startswith(self._usual_end, place.start()):
                return place.start() + len(self._usual_end)
        other = self._followed() if is_last else self._read(self._messages[: owner + 1])
        here = self._ends[owner + 1]
        if other is not None:
            after, there = self._aligned(owner + 1, other)
            here = after.start
            stop = here + self._num_common(after, there)
            ends = [end for begin, end in self._tokens if max(start, here) <= begin and end <= stop]
            # Without a mark, the last token may precede the content.
            if ends and (self._is_marked(owner) or self._is_usual(ends[-1])):
                return ends[-1]
        # The last turn may end with a token that no other turn ends with.
        following = next((token for token in self._tokens if token[0] >= max(start, here)), None)
        if following is None or not (self._is_marked(owner) or (self._usual_end and self._is_usual(following[1]))):
            raise ChatError(NO_END)
        if not is_last and not self._closes_messages(owner, start, following):
            raise ChatError(NO_END)
        return following[1]

    def _is_marked(self, owner: int) -> bool:
        return bool(self._of(owner, CLOSE) or self._of(owner, NAME))

    def _of(self, owner: int, kind: str) -> Sequence[int]:
        """Returns the positions of the marks of a message."""
        return self._places.get((owner, kind), ())

    def _is_usual(self, stop: int) -> bool:
        """Returns True if the token that ends at a position ends turns of another conversation; True if unknown."""
        usual = [found.group() for found in self._special.finditer(self._usual_end)]
        return not usual or self.text.endswith(usual[-1], 0, stop)

    def _closes_messages(self, owner: int, start: int, token: tuple[int, int]) -> bool:
        """Returns True if a token also ends the message before a turn, and another token begins the turn."""
        before = self._ends[owner]
        tokens = [self.text[a:b] for a, b in self._tokens if before <= a and b <= start]
        return before > 0 and len(tokens) > 1 and tokens[0] == self.text[slice(*token)]

    def _followed(self) -> MarkedText | None:
        """Returns the output with another message; None if the template accepts no other message."""
        kinds: list[Message] = [
            {'role': 'user', 'content': 'x'},
            {'role': 'tool', 'name': 'x', 'tool_call_id': 'call00000', 'content': 'x'},
        ]
        for message in kinds[:: -1 if self._messages[-1].get('tool_calls') else 1]:
            try:
                return self._read([*self._messages, message])
            except ChatError:
                continue
        return None

    def _check(self, spans: Sequence[Span], owner: int) -> None:
        span = spans[-1]
        own = self._of(owner, CLOSE)
        is_outside = own and not span.start <= min(own) <= max(own) <= span.stop
        overlaps = len(spans) > 1 and span.start < spans[-2].stop
        if is_outside or overlaps or self._contents.messages_in(*span) - {owner}:
            raise ChatError(f'the chat template mixes an assistant turn with other messages; {_REMEDY}')

    def _read(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> MarkedText:
        return read_marks(self._render(messages, add_generation_prompt=add_generation_prompt))

    def _aligned(self, stop: int, other: MarkedText) -> tuple[_Tail, _Tail]:
        """Returns this output and another one after the last mark of messages before `stop` that both contain."""
        ours, theirs = _ends(self._marks, stop), _ends(other.marks, stop)
        # A later message may repeat a name.
        pairs = [
            (owner, *list(zip(places, theirs[owner, kind], strict=False))[-1])
            for (owner, kind), places in ours.items()
            if (owner, kind) in theirs
        ]
        _, here, there = max(pairs, default=(-1, 0, 0))
        return _Tail(self.text, here), _Tail(other.text, there)

    def _num_common(self, a: _Tail, b: _Tail) -> int:
        """Returns the number of equal characters at the start of two tails, without a part of a special token."""
        num, rest = 0, min(len(a.text) - a.start, len(b.text) - b.start)
        while rest:
            size = (rest + 1) // 2
            if b.text.startswith(a.text[a.start + num : a.start + num + size], b.start + num):
                num += size
                rest -= size
            else:
                rest = size - 1
        for text, start in (a, b):
            for found in self._special.finditer(text, start):
                if found.start() >= start + num:
                    break
                if found.end() > start + num:
                    num = found.start() - start
        return num

    def _is_boundary(self, place: int) -> bool:
        number = bisect.bisect_left(self._tokens, place, key=lambda token: token[1])
        is_token_end = number < len(self._tokens) and self._tokens[number][1] == place
        return is_token_end or self.text[place - 1 : place].isspace()


def mark_visibly(messages: Sequence[Message], render: Render, text: str) -> tuple[list[Message], tuple[TextMark, ...]]:
    """Returns the messages with marks that do not change the output, and the marks in the output."""
    tried: list[Message] = []
    for kinds in MARKINGS:
        marked = mark_messages(messages, kinds)
        if marked == tried:
            continue
        tried = marked
        try:
            output = read_marks(render(marked))
        except ChatError:
            continue
        if output.text == text:
            return marked, tuple(mark for mark in output.marks if mark.owner >= 0)
    return list(messages), ()


def _ends(marks: Sequence[TextMark], stop: int) -> dict[tuple[int, str], list[int]]:
    """Returns the positions of the ends of contents and names, by message before `stop` and kind."""
    found: dict[tuple[int, str], list[int]] = {}
    for place, kind, owner in marks:
        if kind in (CLOSE, NAME) and owner < stop:
            found.setdefault((owner, kind), []).append(place)
    return found
