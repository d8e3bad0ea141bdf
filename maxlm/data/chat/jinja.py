"""Compiles and renders Jinja chat templates in this process, compatible with Transformers.

Jinja's sandbox restricts access to Python objects but limits neither time nor memory. Templates from other sources are
therefore rendered in a separate process: see `template_process`. `strftime_now` is not available, because prepared data
must not depend on the date. Templates that use it have a fixed date as a fallback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from maxlm.data.chat.continuation import render_continued
from maxlm.data.chat.escape import escape_special_tokens, special_token_pattern
from maxlm.data.chat.generation_blocks import find_blocks
from maxlm.data.chat.marks import END_GENERATION, GENERATION, MARK, mark, read_marks
from maxlm.data.chat.rendered import ChatError, Rendered
from maxlm.data.chat.turns import NO_END, Render, TurnFinder
from maxlm.data.documents.messages import Message

# Maximum length of an error message.
_MAX_REASON = 500
_DATE_HINT = (
    ', because prepared data must not depend on the date; begin the template with '
    '{% macro strftime_now(format) %}2025-01-01{% endmacro %}'
)
# Names of the reasoning in a message. Transformers prefers the first.
_REASONING = ('reasoning_content', 'thinking', 'reasoning')


class TemplateProperties(NamedTuple):
    """Properties of a template, from its source.

    Attributes:
        texts: all texts in the template.
        undeclared: variables that the template uses but does not set.
        has_generation: True if the template marks assistant messages with `{% generation %}`.
    """

    texts: tuple[str, ...]
    undeclared: tuple[str, ...]
    has_generation: bool


class _Probe(NamedTuple):
    """Result of rendering a simple conversation.

    Attributes:
        token: special token at the end of the turn.
        usual_end: text from the end of the content to the end of the turn; '' = unknown.
    """

    token: str
    usual_end: str


class JinjaTemplate:
    """A compiled template.

    Attributes:
        properties: properties of the template.
    """

    def __init__(self, source: str, *, is_trusted: bool = False):
        """Compiles the template.

        Args:
            source: Jinja source.
            is_trusted: the blocks of `{% generation %}` contain only messages of the assistant.

        Raises:
            ChatError: `source` is not a valid template.
        """
        self._is_trusted = is_trusted
        self._probes: dict[tuple[str, ...], _Probe] = {}
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
        self.properties = TemplateProperties(
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
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """See `ChatTemplate.render`."""
        data, placeholders = _hide(messages, special, tools, template_kwargs)
        render, messages = self._renderer(data), data['messages']
        if continue_final_message:
            text = render_continued(messages, render)
        else:
            text = read_marks(render(messages, add_generation_prompt=add_generation_prompt)).text
        return Rendered(text, (), placeholders)

    def render_with_spans(
        self, messages: Sequence[Message], *, special: Sequence[str], tools: Sequence[Any] = ()
    ) -> Rendered:
        """See `ChatTemplate.render_with_spans`."""
        data, placeholders = _hide(messages, special, tools)
        render, messages = self._renderer(data), data['messages']
        special = tuple(special)
        if self.properties.has_generation:
            text, spans = find_blocks(
                messages,
                render,
                special,
                end_of_turn=lambda: self._probed(special).token,
                is_trusted=self._is_trusted,
            )
        else:
            usual_end = self._probed(special).usual_end
            finder = TurnFinder(messages, render, special_token_pattern(special), usual_end)
            text, spans = finder.text, finder.find()
        return Rendered(text, tuple(spans), placeholders)

    def end_of_turn(self, special: Sequence[str]) -> str:
        """See `ChatTemplate.end_of_turn`."""
        return self._probed(tuple(special)).token

    def _probed(self, special: tuple[str, ...]) -> _Probe:
        """Returns the end of a simple turn. Raises ChatError if the turn cannot be rendered or has no end."""
        if special not in self._probes:
            self._probes[special] = self._probe(special)
        return self._probes[special]

    def _probe(self, special: tuple[str, ...]) -> _Probe:
        messages = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]
        render = self._renderer({'tools': [], 'template_kwargs': {}})
        pattern = special_token_pattern(special)
        finder = TurnFinder(messages, render, pattern)
        try:
            text, spans, usual_end = finder.text, finder.find(), ''
            usual_end = finder.usual_end(spans[-1])
        except ChatError:
            if not self.properties.has_generation:
                raise
            text, spans = find_blocks(messages, render, special, end_of_turn=str, is_trusted=True)
            usual_end = ''
        tokens = pattern.findall(text, *spans[-1]) if spans else []
        if not tokens:
            raise ChatError(NO_END)
        return _Probe(tokens[-1], usual_end)

    def _renderer(self, data: Mapping[str, Any]) -> Render:
        return functools.partial(self._render, tools=data['tools'], template_kwargs=data['template_kwargs'])

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any],
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._template.render(
                {'documents': None, **template_kwargs},
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        # A template can raise any exception for unexpected messages.
        except Exception as error:
            hint = _DATE_HINT if "'strftime_now' is undefined" in str(error) else ''
            raise ChatError(f'the chat template rejects the messages: {_line(error)}{hint}') from error


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}` … `{% endgeneration %}` around assistant messages."""

    tags = {'generation'}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method('_mark'), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f'{mark(GENERATION)}{caller()}{mark(END_GENERATION)}'


class _Namespace(jinja2.utils.Namespace):
    """Namespace that refuses names with a leading underscore, which could be confused with Python's own attributes."""

    def __init__(*args: Any, **names: Any) -> None:
        namespace, *mappings = args
        for name in (values := dict(*mappings, **names)):
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
    messages: Sequence[Message],
    special: Sequence[str],
    tools: Sequence[Any],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    data = {
        'messages': [_with_reasoning(message) for message in messages],
        'tools': list(tools),
        'template_kwargs': dict(template_kwargs or {}),
    }
    try:
        return escape_special_tokens(data, (*special, MARK))
    except RecursionError as error:
        raise ChatError('a message is nested too deeply') from error


def _with_reasoning(message: Message) -> Message:
    """Copies reasoning to the names that templates read, and removes absent values, like Transformers."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {'thinking': reasoning, **present, 'reasoning_content': reasoning}


def _line(error: Exception) -> str:
    line = ' '.join(str(error)[:_MAX_REASON].split())
    return {MemoryError: 'out of memory', RecursionError: 'nested too deeply'}.get(type(error), line) or type(
        error
    ).__name__
