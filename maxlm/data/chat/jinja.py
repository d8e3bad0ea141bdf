"""Compiles and renders Jinja chat templates in this process, compatible with Transformers.

Jinja's sandbox restricts access to Python objects but limits neither time nor memory. Templates from other sources are
therefore rendered in a separate process: see `template_process`. `strftime_now` is not available, because prepared data
must not depend on the date. Templates that use it have a fixed date as a fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from maxlm.data.chat.escape import escape_special_tokens, special_token_pattern
from maxlm.data.documents.conversation import Message

# Maximum length of an error message.
_MAX_REASON = 500
# Markers around assistant messages during rendering. They are noncharacters of Unicode.
_OPEN, _CLOSE = '\U0010fffe', '\U0010ffff'
_NO_END = 'the chat template ends an assistant turn without a special token, so the model would not learn to stop'


class ChatError(ValueError):
    """A template cannot render a conversation. The message is one line."""


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: the rendered text. In data, the first character of each special token is replaced by a placeholder.
        assistant_spans: for each assistant message, the span up to and including the end of its turn. Empty if the
            spans were not requested.
        placeholders: maps each placeholder to its original character.
    """

    text: str
    assistant_spans: tuple[Span, ...]
    placeholders: Mapping[str, str]

    def spelled(self, start: int, stop: int) -> str:
        """Returns the characters [start, stop) with the original characters instead of placeholders."""
        return self.text[start:stop].translate(
            {ord(placeholder): character for placeholder, character in self.placeholders.items()}
        )


class TemplateFacts(NamedTuple):
    """Properties of a template, from its source.

    Attributes:
        texts: all texts in the template.
        undeclared: variables that the template uses but does not set.
        has_generation: True if the template marks assistant messages with `{% generation %}`.
    """

    texts: tuple[str, ...]
    undeclared: tuple[str, ...]
    has_generation: bool


class JinjaTemplate:
    """A compiled template.

    Attributes:
        facts: properties of the template.
    """

    def __init__(self, source: str):
        """Compiles the template. Raises ChatError if `source` is not a valid template."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f'line {error.lineno} is not valid in a chat template: {_line(error)}') from error
        # Python's compiler has its own limits, and Jinja evaluates constant expressions here.
        except Exception as error:
            raise ChatError(f'the chat template cannot be compiled: {_line(error)}') from error
        constants = (node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
        texts = (*constants, *(node.data for node in tree.find_all(jinja2.nodes.TemplateData)))
        calls = tree.find_all(jinja2.nodes.ExtensionAttribute)
        self.facts = TemplateFacts(
            texts,
            tuple(sorted(jinja2.meta.find_undeclared_variables(tree))),
            any(call.identifier == _Generation.identifier for call in calls),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        special: Sequence[str] = (),
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """See `ChatTemplate.render`."""
        data, placeholders = _hide(messages, tools, special)
        text = self._render(data['messages'], data['tools'], add_generation_prompt=add_generation_prompt)
        return Rendered(text.replace(_OPEN, '').replace(_CLOSE, ''), (), placeholders)

    def render_with_spans(
        self, messages: Sequence[Message], *, special: Sequence[str], tools: Sequence[Any] = ()
    ) -> Rendered:
        """See `ChatTemplate.render_with_spans`."""
        data, placeholders = _hide(messages, tools, special)
        text = self._render(data['messages'], data['tools'])
        if self.facts.has_generation:
            text, spans = _extract_marked(text)
        else:
            spans = self._turns(text, data['messages'], data['tools'], special_token_pattern(tuple(special)))
        return Rendered(text, tuple(_with_end(text, span, tuple(special)) for span in spans), placeholders)

    def _turns(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any], special: re.Pattern[str]
    ) -> list[Span]:
        spans = []
        for place, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            invited = self._render(messages[:place], tools, add_generation_prompt=True)
            through = self._render(messages[: place + 1], tools) if place + 1 < len(messages) else text
            if not (text.startswith(invited) and through.startswith(invited)):
                raise ChatError(
                    'the chat template renders turns differently once later turns follow, so assistant text cannot be '
                    'located; put it between {% generation %} and {% endgeneration %}'
                )
            ends = list(special.finditer(through, len(invited)))
            if not ends:
                raise ChatError(_NO_END)
            stop = ends[-1].end()
            if not text.startswith(through[:stop]):
                # Some templates remove the reasoning of earlier turns. The turn then ends at the next such token.
                found = text.find(ends[-1].group(), len(invited))
                if found < 0:
                    raise ChatError(_NO_END)
                stop = found + len(ends[-1].group())
            spans.append(Span(len(invited), stop))
        return spans

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        # A template can raise any exception for unexpected messages.
        except Exception as error:
            raise ChatError(f'the chat template rejects the messages: {_line(error)}') from error


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}` … `{% endgeneration %}` around assistant messages."""

    tags = {'generation'}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method('_mark'), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f'{_OPEN}{caller()}{_CLOSE}'


class _Namespace(jinja2.utils.Namespace):
    """Namespace that refuses names with a leading underscore, which could be confused with Python's own attributes."""

    def __init__(*args: Any, **names: Any) -> None:
        namespace, *given = args
        for name in (values := dict(*given, **names)):
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith('_'):
        raise jinja2.exceptions.SecurityError(f'a namespace has no name {name!r}')


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML.
    environment.filters['tojson'] = _to_json
    environment.globals |= {'raise_exception': _raise, 'namespace': _Namespace}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _hide(
    messages: Sequence[Message], tools: Sequence[Any], special: Sequence[str]
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    try:
        return escape_special_tokens({'messages': list(messages), 'tools': list(tools)}, (*special, _OPEN, _CLOSE))
    except RecursionError as error:
        raise ChatError('a message is nested too deeply') from error


def _extract_marked(text: str) -> tuple[str, list[Span]]:
    """Returns the text without markers, and the spans between the markers."""
    spans: list[Span] = []
    parts: list[str] = []
    length = 0
    for before in text.split(_OPEN):
        marked, closed, after = before.partition(_CLOSE) if parts else ('', '', before)
        if closed:
            spans.append(Span(length, length + len(marked)))
        parts += [marked, after]
        length += len(marked) + len(after)
    return ''.join(parts), spans


def _with_end(text: str, span: Span, special: tuple[str, ...]) -> Span:
    """Extends a span by the special token that follows it, unless the span already ends with a special token."""
    if text.endswith(special, *span):
        return span
    end = special_token_pattern(special).match(text, span.stop)
    if end is None:
        raise ChatError(_NO_END)
    return Span(span.start, end.end())


def _line(error: Exception) -> str:
    line = ' '.join(str(error)[:_MAX_REASON].split())
    return {MemoryError: 'out of memory', RecursionError: 'nested too deeply'}.get(type(error), line) or type(
        error
    ).__name__
