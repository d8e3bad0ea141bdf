"""Chat template of nanochat's conversations, from `RustBPETokenizer.render_conversation`.

A turn of the assistant may contain calls of its only tool, Python, and their results:

    <|assistant_start|>text<|python_start|>code<|python_end|>
    <|output_start|>result<|output_end|>text<|assistant_end|>

Such a turn is three messages: the first text with the call `python` and its argument `code`, the result of the tool,
and the second text. `maxlm.data.documents.content_parts` makes them of nanochat's parts.
"""

from __future__ import annotations

# Tokens that the template needs.
TOKENS = (
    *('<|bos|>', '<|user_start|>', '<|user_end|>', '<|assistant_start|>', '<|assistant_end|>'),
    *('<|python_start|>', '<|python_end|>', '<|output_start|>', '<|output_end|>'),
)
# A system message is put before the first message of the user. `state.is_open` means that the turn of the assistant has
# not ended.
TEMPLATE = """\
{{- '<|bos|>' }}
{%- set state = namespace(is_open=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not state.is_open %}
        {{- '<|user_start|>' }}
        {%- if loop.index0 == 1 and messages[0].role == 'system' %}
            {{- messages[0].content + '\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|user_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant_start|>' if not state.is_open }}
        {%- set state.is_open = message.tool_calls | default([]) | length > 0 %}
        {%- generation %}
            {{- message.content }}
            {%- if state.is_open %}
                {%- set call = message.tool_calls[0].function %}
                {%- if message.tool_calls | length > 1 or call.name != 'python'
                       or call.arguments | list != ['code'] or call.arguments.code is not string %}
                    {{- raise_exception('nanochat has one tool, python with the text code, and one call per message') }}
                {%- endif %}
                {{- '<|python_start|>' + call.arguments.code + '<|python_end|>' }}
            {%- else %}
                {{- '<|assistant_end|>' }}
            {%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' and state.is_open %}
        {{- '<|output_start|>' + message.content + '<|output_end|>' }}
    {%- elif not (loop.first and message.role == 'system' and messages[1].role == 'user') %}
        {{- raise_exception('nanochat has only a first system message, users, assistants, and results of calls') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not state.is_open %}
    {{- '<|assistant_start|>' }}
{%- endif %}
"""
