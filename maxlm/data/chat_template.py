"""Chat templates: how a conversation is spelled, in Jinja, with the rules of Transformers.

A template is rendered in a sandbox: templates come with models from anywhere. `strftime_now` is not offered, so that
what is made of data does not depend on the day; the templates that know it have a fixed date without it.
"""

from __future__ import annotations

import hashlib
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

from maxlm.data.chat import Message
from maxlm.data.stand_ins import hide, spelling
from maxlm.errors import InputError, os_message
from maxlm.storage.regular import read_text

# OpenAI's ChatML, with the calls of tools as Hermes and Qwen write them.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n' if message.content or not loop.first }}
                {{- '<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Llama 3's, for texts alone.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('the template llama3 shows no tool calls') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TEMPLATES = {'chatml': CHATML, 'llama3': LLAMA3}
# What a template may ask of the tokenizer.
VARIABLES = ('bos_token', 'eos_token', 'pad_token', 'unk_token')
# Spellings of special tokens that are known as such wherever a template has them.
_SPECIAL = re.compile(r'<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>')
# Around what the assistant says, while a conversation is rendered: noncharacters.
_OPEN, _CLOSE = '\U0010fffe', '\U0010ffff'
_NO_END = (
    'the chat template ends a turn of the assistant with no special token, so that a model would not learn to stop'
)


class ChatError(ValueError):
    """A conversation that a template does not spell. The message is one line."""


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation."""

    start: int
    stop: int


class Rendered(NamedTuple):
    """A conversation as a template spells it.

    Attributes:
        text: all of it. Where data spells a special token, a stand-in is in place of its first character.
        said: for each message of the assistant, what it says up to the end of its turn.
        stand_ins: stand-in → the character that it is in place of.
    """

    text: str
    said: tuple[Span, ...]
    stand_ins: Mapping[str, str]

    def spelled(self, start: int, stop: int) -> str:
        """The characters [start, stop) with those that belong in place of stand-ins."""
        return self.text[start:stop].translate(
            {ord(stand_in): character for stand_in, character in self.stand_ins.items()}
        )


class ChatTemplate:
    """A template, compiled.

    Attributes:
        source: Jinja.
        texts: all texts in it.
        tokens: the special tokens that these spell, as far as it shows: `<|…|>` and `<start_of_turn>`.
        variables: those of VARIABLES that it uses and does not set.
        has_generation: whether it tells by `{% generation %}` what the assistant says.
    """

    def __init__(self, source: str, *, name: str):
        """Raises InputError, naming `name`, when `source` is no template."""
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f'{name}: line {error.lineno} is not of a chat template: {_line(error)}') from error
        constants = (node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
        self.texts = (*constants, *(node.data for node in tree.find_all(jinja2.nodes.TemplateData)))
        self.tokens = tuple(dict.fromkeys(token for text in self.texts for token in _SPECIAL.findall(text)))
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        self.variables = tuple(variable for variable in VARIABLES if variable in undeclared)
        calls = tree.find_all(jinja2.nodes.ExtensionAttribute)
        self.has_generation = any(call.identifier == _Generation.identifier for call in calls)

    @property
    def sha256(self) -> str:
        """Checksum of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        *,
        special: Sequence[str] = (),
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Messages as Transformers' `apply_chat_template` spells them; `said` is empty.

        Args:
            messages: JSON objects with `role` and `content`.
            special: spellings that have stand-ins where data has them.
            tools: JSON values.
            add_generation_prompt: whether what begins a turn of the assistant comes last.

        Raises:
            ChatError: the template refuses the messages, or fails.
        """
        data, stand_ins = _hide(messages, tools, special)
        text = self._render(data['messages'], data['tools'], add_generation_prompt=add_generation_prompt)
        return Rendered(text.replace(_OPEN, '').replace(_CLOSE, ''), (), stand_ins)

    def render_said(
        self, messages: Sequence[Message], *, special: Sequence[str], tools: Sequence[Any] = ()
    ) -> Rendered:
        """The same with what the assistant says, each time up to and with the special token that ends its turn.

        Without `{% generation %}` that is what comes between the text that invites the assistant and the next turn.

        Raises:
            ChatError: as above, or it cannot be told, or nothing special ends a turn.
        """
        data, stand_ins = _hide(messages, tools, special)
        text = self._render(data['messages'], data['tools'])
        if self.has_generation:
            text, said = _take_marks(text)
        else:
            said = self._turns(text, data['messages'], data['tools'], spelling(tuple(special)))
        return Rendered(text, tuple(_with_end(text, span, tuple(special)) for span in said), stand_ins)

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
                    'the chat template spells turns in another way once others follow, so that it does not show what '
                    'the assistant says; put that between {% generation %} and {% endgeneration %}'
                )
            ends = list(special.finditer(through, len(invited)))
            if not ends:
                raise ChatError(_NO_END)
            stop = ends[-1].end()
            if not text.startswith(through[:stop]):
                # Some leave out the thoughts of earlier turns: then the turn ends with the next such token.
                stop = text.index(ends[-1].group(), len(invited)) + len(ends[-1].group())
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
        # Whatever it does with messages that it was not made for.
        except Exception as error:
            raise ChatError(f'the chat template does not take it: {_line(error)}') from error


def set_variables(source: str, values: Mapping[str, str]) -> str:
    """The source of a template that knows the values of its variables without a tokenizer."""
    lines = (f'{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n' for name, value in values.items())
    return ''.join(lines) + source


def load_template(given: str) -> ChatTemplate:
    """The template of a name of TEMPLATES, or of a file. Raises InputError when there is none such."""
    if given in TEMPLATES:
        return ChatTemplate(TEMPLATES[given], name=given)
    try:
        source = read_text(given)
    except UnicodeDecodeError as error:
        raise InputError(f'--chat_template={given}: byte {error.start} is not UTF-8; a Jinja file is needed') from error
    except OSError as error:
        names = ', '.join(TEMPLATES)
        raise InputError(
            f'--chat_template={given}: {os_message(error)}; give a Jinja file or one of {names}'
        ) from error
    return ChatTemplate(source, name=given)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}` around what the assistant says."""

    tags = {'generation'}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method('_mark'), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f'{_OPEN}{caller()}{_CLOSE}'


class _Namespace(jinja2.utils.Namespace):
    """Names that begin with an underscore would be taken for Python's own by what handles the object."""

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
    # Jinja's own escapes HTML.
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
    return hide({'messages': list(messages), 'tools': list(tools)}, (*special, _OPEN, _CLOSE))


def _take_marks(text: str) -> tuple[str, list[Span]]:
    """The text without the marks, and what was between them."""
    spans: list[Span] = []
    parts: list[str] = []
    length = 0
    for before in text.split(_OPEN):
        said, closed, after = before.partition(_CLOSE) if parts else ('', '', before)
        if closed:
            spans.append(Span(length, length + len(said)))
        parts += [said, after]
        length += len(said) + len(after)
    return ''.join(parts), spans


def _with_end(text: str, span: Span, special: tuple[str, ...]) -> Span:
    """The span up to the special token that ends it; if a template leaves that outside, it must be the next."""
    if text.endswith(special, *span):
        return span
    end = spelling(special).match(text, span.stop)
    if end is None:
        raise ChatError(_NO_END)
    return Span(span.start, end.end())


def _line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__
