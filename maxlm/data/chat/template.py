"""Chat templates in Jinja, compatible with Transformers.

Templates from other sources are untrusted, so `template_process` renders them within limits. The templates in this file
are rendered in this process, which is faster.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.data.chat.jinja import JinjaTemplate
from maxlm.data.chat.rendered import ChatError, Rendered
from maxlm.data.chat.template_process import RemoteTemplate
from maxlm.data.documents.messages import Message
from maxlm.errors import InputError, os_message
from maxlm.sandbox.limited_process import ProcessLimits
from maxlm.storage.regular_files import read_text

# OpenAI's ChatML, with tool calls in the format of Hermes and Qwen.
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
# Llama 3's template without tool calls.
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
# Variables of the tokenizer that a template may use.
VARIABLES = ('bos_token', 'eos_token', 'pad_token', 'unk_token')
# Variables that callers cannot set: arguments of `apply_chat_template`, and variables that have their own values.
RESERVED = frozenset(
    {
        *VARIABLES,
        'messages',
        'tools',
        'add_generation_prompt',
        'continue_final_message',
        'chat_template',
        'conversation',
    }
    | {'tokenize', 'return_dict', 'return_tensors', 'return_assistant_tokens_mask'}
)
# Texts that are recognized as special tokens in a template.
_SPECIAL = re.compile(r'<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>')
# Prefix that `set_variables` writes.
_SET = re.compile(r'(?:\{%- set \w+ = "(?:[^"\\\n]|\\.)*" %\}\n)*')
_DEVELOPER = 'developer'
# Maximum number of characters of a template, far more than known models use.
_MAX_SOURCE = 4 << 20


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: Jinja source.
        texts: all texts in the template.
        tokens: special tokens in these texts that are recognized by their form: `<|…|>` and `<start_of_turn>`.
        variables: elements of VARIABLES that the template uses but does not set.
        has_generation: True if the template marks assistant messages with `{% generation %}`.
    """

    def __init__(self, source: str, *, name: str, limits: ProcessLimits | None = None):
        """Compiles a template.

        Args:
            source: Jinja source.
            name: name of the template in messages.
            limits: limits of a template that is not in TEMPLATES; None = the default.

        Raises:
            InputError: `source` is not a valid template or exceeds the limits.
        """
        self.source = source
        if len(source) > _MAX_SOURCE:
            raise InputError(
                f'{name}: a chat template has at most {_MAX_SOURCE} characters, and this has {len(source)}'
            )
        known = _SET.sub('', source, count=1) in TEMPLATES.values()
        try:
            self._template = JinjaTemplate(source, is_trusted=True) if known else RemoteTemplate(source, limits)
        except ChatError as error:
            raise InputError(f'{name}: {error}; fix the template') from error
        properties = self._template.properties
        self.texts, self.has_generation = properties.texts, properties.has_generation
        self.tokens = tuple(dict.fromkeys(token for text in self.texts for token in _SPECIAL.findall(text)))
        self.variables = tuple(variable for variable in VARIABLES if variable in properties.undeclared)

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
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Renders messages like `apply_chat_template` of Transformers. `assistant_spans` is empty.

        Args:
            messages: JSON objects with `role` and `content`.
            special: special tokens to escape in the data.
            tools: JSON values.
            add_generation_prompt: whether to append the beginning of an assistant turn.
            continue_final_message: whether to end the text after the content of the last message.
            template_kwargs: JSON values of other variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: the options exclude each other, or the template rejects the messages, fails, or exceeds its
                limits.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatError('add_generation_prompt and continue_final_message exclude each other; set only one')
        if reserved := sorted(set(template_kwargs or {}) & RESERVED):
            raise ChatError(f'the template variable {reserved[0]} cannot be set by the caller; remove it')
        return self._template.render(
            self._with_known_roles(messages),
            special=special,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=dict(template_kwargs or {}),
        )

    def render_with_spans(
        self, messages: Sequence[Message], *, special: Sequence[str], tools: Sequence[Any] = ()
    ) -> Rendered:
        """Renders messages and finds the assistant messages, each with the special token that ends its turn.

        The spans are those of `{% generation %}`. Without these blocks, see `turns`.

        Raises:
            ChatError: the template fails as in `render`, a message cannot be located, or a turn has no special token
                at its end.
        """
        return self._template.render_with_spans(self._with_known_roles(messages), special=special, tools=tools)

    def _with_known_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages, with the role `system` instead of `developer` unless the template names the latter.

        OpenAI renamed the role. Templates that do not know the new name omit the message or show a name that their
        model has never seen. llama.cpp replaces it too.
        """
        if _DEVELOPER in self.source:
            return list(messages)
        return [{**message, 'role': 'system'} if message.get('role') == _DEVELOPER else message for message in messages]

    def end_of_turn(self, special: Sequence[str]) -> str:
        """Returns the special token that ends a turn of the assistant.

        Raises:
            ChatError: the template cannot render a simple conversation, or its turns end without a special token.
        """
        return self._template.end_of_turn(special)


def set_variables(source: str, values: Mapping[str, str]) -> str:
    """Returns the source of a template with the values of its variables prepended."""
    lines = (f'{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n' for name, value in values.items())
    return ''.join(lines) + source


def drop_variables(source: str, values: Mapping[str, str]) -> str:
    """Returns a template without the lines of `set_variables` that set the given values."""
    prefix = _SET.match(source)
    end = prefix.end() if prefix else 0
    assignments = set_variables('', values).splitlines(keepends=True)
    return ''.join(line for line in source[:end].splitlines(keepends=True) if line not in assignments) + source[end:]


def load_template(template: str) -> ChatTemplate:
    """Loads a template by its name in TEMPLATES or from a file. Raises InputError if neither exists."""
    if template in TEMPLATES:
        return ChatTemplate(TEMPLATES[template], name=template)
    try:
        source = read_text(template)
    except UnicodeDecodeError as error:
        raise InputError(f'--chat-template={template}: byte {error.start} is not UTF-8; give a Jinja file') from error
    except OSError as error:
        names = ', '.join(TEMPLATES)
        raise InputError(
            f'--chat-template={template}: {os_message(error)}; give a Jinja file or one of {names}'
        ) from error
    return ChatTemplate(source, name=template)


# File of the chat template in the tokenizer's directory. Transformers uses the same name.
CHAT_TEMPLATE_FILE = 'chat_template.jinja'
# File of the template for conversations with tools, if it is another one.
TOOL_TEMPLATE_FILE = 'additional_chat_templates/tool_use.jinja'
