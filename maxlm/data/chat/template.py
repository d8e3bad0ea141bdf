"""Chat templates: how a conversation is spelled, in Jinja, with the rules of Transformers.

Templates come with models from anywhere, so they are rendered by `chat_process`, within limits. The templates of this
file need none, and are rendered in this process, which costs less.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.chat.jinja import ChatError, JinjaTemplate, Rendered
from maxlm.data.chat.template_process import RemoteTemplate, RenderLimits
from maxlm.data.documents.conversation import Message
from maxlm.errors import InputError, os_message
from maxlm.storage.regular_files import read_text

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
# What `set_variables` writes.
_SET = re.compile(r'(?:\{%- set \w+ = "(?:[^"\\\n]|\\.)*" %\}\n)*')
# Characters of a template, far more than any model has.
_MAX_SOURCE = 4 << 20


class ChatTemplate:
    """A template, compiled.

    Attributes:
        source: Jinja.
        texts: all texts in it.
        tokens: the special tokens that these spell, as far as it shows: `<|…|>` and `<start_of_turn>`.
        variables: those of VARIABLES that it uses and does not set.
        has_generation: whether it tells by `{% generation %}` what the assistant says.
    """

    def __init__(self, source: str, *, name: str, limits: RenderLimits | None = None):
        """
        Args:
            source: Jinja.
            name: that of the template in messages.
            limits: those of a template that is none of TEMPLATES; None = the default.

        Raises:
            InputError: `source` is no template, or is beyond the limits.
        """
        self.source = source
        if len(source) > _MAX_SOURCE:
            raise InputError(f'{name}: {len(source)} characters are no chat template; at most {_MAX_SOURCE} are read')
        known = _SET.sub('', source, count=1) in TEMPLATES.values()
        try:
            self._template = JinjaTemplate(source) if known else RemoteTemplate(source, limits)
        except ChatError as error:
            raise InputError(f'{name}: {error}') from error
        facts = self._template.facts
        self.texts, self.has_generation = facts.texts, facts.has_generation
        self.tokens = tuple(dict.fromkeys(token for text in self.texts for token in _SPECIAL.findall(text)))
        self.variables = tuple(variable for variable in VARIABLES if variable in facts.undeclared)

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
            ChatError: the template refuses the messages, fails, or is beyond its limits.
        """
        return self._template.render(
            messages, special=special, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def render_said(
        self, messages: Sequence[Message], *, special: Sequence[str], tools: Sequence[Any] = ()
    ) -> Rendered:
        """The same with what the assistant says, each time up to and with the special token that ends its turn.

        Without `{% generation %}` that is what comes between the text that invites the assistant and the next turn.

        Raises:
            ChatError: as above, or it cannot be told, or nothing special ends a turn.
        """
        return self._template.render_said(messages, special=special, tools=tools)


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
        raise InputError(f'--chat-template={given}: byte {error.start} is not UTF-8; a Jinja file is needed') from error
    except OSError as error:
        names = ', '.join(TEMPLATES)
        raise InputError(
            f'--chat-template={given}: {os_message(error)}; give a Jinja file or one of {names}'
        ) from error
    return ChatTemplate(source, name=given)


# File of the chat template, beside the tokenizer. Transformers has the same name.
CHAT_TEMPLATE_FILE = 'chat_template.jinja'
