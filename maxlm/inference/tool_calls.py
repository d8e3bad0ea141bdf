"""Tool calls in generated text, in the format of Hermes and Qwen: `<tool_call>`, a JSON object and `</tool_call>`."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlm.data.documents.tool_calls import parse_arguments
from maxlm.storage.json_text import parse_json, to_json

BEGIN, END = '<tool_call>', '</tool_call>'
# A JSON string, the rest of a line or text after a quotation mark without an end, or the end of a call.
_STRING_OR_END = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:"|\\?\Z)?|' + END)
# The beginning of a call whose arguments may be incomplete.
_PARTIAL = re.compile(r'\s*\{"name": ("[^"\\]*(?:\\.[^"\\]*)*"), "arguments": (.*)', re.DOTALL)
# Chat templates write the object with `json.dumps`.
_WHITESPACE = {'whitespace_flexible': False, 'item_separator': ', ', 'key_separator': ': '}


class ToolCall(NamedTuple):
    """A call of a function. `arguments` is a JSON object as text, or the beginning of one if the call is partial."""

    id: str
    name: str
    arguments: str

    @property
    def fields(self) -> dict[str, Any]:
        """The call as an object of OpenAI's API."""
        return {'id': self.id, 'type': 'function', 'function': {'name': self.name, 'arguments': self.arguments}}


def call_grammar(functions: Mapping[str, Mapping[str, Any]], *, is_required: bool, is_single: bool) -> str:
    """Returns the grammar of a text that may contain tool calls, for `Request.grammar`.

    Args:
        functions: JSON schema of the arguments of each function, by name.
        is_required: the text consists of calls only. Otherwise text before and between calls is free.
        is_single: the text contains at most one call.
    """
    calls = [_call_rule(name, arguments) for name, arguments in functions.items()]
    begin = f'"{BEGIN}"' if is_required else 'begin'
    if is_required:
        start = ['start: call' if is_single else 'start: call ("\\n" call)*']
    else:
        start = ['start: call | TEXT' if is_single else 'start: call* TEXT', 'TEXT: /(.|\\n)*/']
        start += [f'begin[lazy]: TEXT "{BEGIN}"']
    # Each schema is the root of its references, such as `#/$defs/a`.
    rules = [f'call_{index}: {call}' for index, call in enumerate(calls)]
    names = ' | '.join(f'call_{index}' for index in range(len(calls)))
    return '\n'.join(['%llguidance {}', *start, f'call: {begin} "\\n" ({names}) "\\n{END}"', *rules, ''])


def _call_rule(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the content of a grammar rule for the calls of one function."""
    before = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
    schema = json.dumps({**arguments, 'x-guidance': _WHITESPACE}, ensure_ascii=False)
    return f'{before} %json {schema} "}}"'


class ToolCallParser:
    """Splits the text of one choice into content and tool calls while it is generated.

    Attributes:
        num_calls: number of calls so far.
        is_partial: True if the text ended within a call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_partial = False
        self._rest = ''

    def feed(self, text: str, *, is_last: bool, allow_partial: bool = False) -> list[str | ToolCall]:
        """Returns the pieces of content and the calls that are complete, in order.

        The possible beginning of a call, and whitespace before it, are withheld. At the end of a text, an incomplete
        call is content by default. With `allow_partial`, it is a call with the beginning of its arguments, as in
        OpenAI's API, or nothing if it has none yet.
        """
        self._rest += text
        pieces: list[str | ToolCall] = []
        while True:
            before, begin, after = self._rest.partition(BEGIN)
            if END not in after:
                break
            stop = _end_of_call(after)
            if stop is None and (allow_partial or not is_last):
                break
            call = None if stop is None else self._parse(after[:stop])
            if call is None or stop is None:
                stop = after.index(END)
                pieces.append(before + begin + after[:stop] + END)
            else:
                pieces += [piece for piece in (before.rstrip(), call) if piece]
            self._rest = after[stop + len(END) :]
        before, begin, after = self._rest.partition(BEGIN)
        if is_last and allow_partial and begin:
            self._rest = ''
            return pieces + [piece for piece in (before.rstrip(), self._parse_partial(after)) if piece]
        held = 0 if is_last else self._num_held()
        content, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        # Line breaks between and after calls are no content.
        if content.strip() or (content and not self.num_calls):
            pieces.append(content)
        return pieces

    def _num_held(self) -> int:
        """Returns the number of characters at the end that may belong to a call."""
        place = self._rest.find(BEGIN)
        if place < 0:
            lengths = (length for length in range(len(BEGIN) - 1, 0, -1) if self._rest.endswith(BEGIN[:length]))
            place = len(self._rest) - next(lengths, 0)
        return len(self._rest) - len(self._rest[:place].rstrip())

    def _parse(self, body: str) -> ToolCall | None:
        try:
            call = parse_json(body)
        except ValueError:
            return None
        if not isinstance(call, dict):
            return None
        arguments = call.get('arguments')
        try:
            # Some models write the arguments as a string.
            shown = arguments if isinstance(arguments, list | int | float) else parse_arguments(arguments)
            return self._call(call.get('name'), to_json(shown))
        except ValueError:
            return None

    def _parse_partial(self, body: str) -> ToolCall | None:
        # Only the end of the call may be missing.
        call = self._parse(body[: body.rfind('}') + 1])
        if call is not None:
            return call
        self.is_partial = True
        found = _PARTIAL.match(body)
        try:
            return None if found is None else self._call(parse_json(found[1]), found[2])
        except ValueError:
            return None

    def _call(self, name: Any, arguments: str) -> ToolCall | None:
        """Returns a call, or None if the name is no text. Raises ValueError for unpaired surrogates in the name."""
        if not isinstance(name, str):
            return None
        to_json(name)
        self.num_calls += 1
        return ToolCall(f'call_{uuid.uuid4().hex}', name, arguments)


def _end_of_call(text: str) -> int | None:
    """Returns the position of the first END outside of JSON strings; None if it may still follow."""
    return next((found.start() for found in _STRING_OR_END.finditer(text) if found.group() == END), None)
