"""Chat template of nanochat's conversations, from `RustBPETokenizer.render_conversation` without tool calls."""

from __future__ import annotations

# Tokens that the template needs.
TOKENS = ('<|bos|>', '<|user_start|>', '<|user_end|>', '<|assistant_start|>', '<|assistant_end|>')
# A system message is put before the first message of the user.
TEMPLATE = """\
{{- '<|bos|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('the template of nanochat shows no tool calls') }}
    {%- elif message.role == 'user' %}
        {{- '<|user_start|>' }}
        {%- if loop.index0 == 1 and messages[0].role == 'system' %}
            {{- messages[0].content + '\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|user_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant_start|>' }}
        {%- generation %}
            {{- message.content + '<|assistant_end|>' }}
        {%- endgeneration %}
    {%- elif not (loop.first and message.role == 'system' and messages[1].role == 'user') %}
        {{- raise_exception('the template of nanochat has only a first system message, users and assistants') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant_start|>' }}
{%- endif %}
"""
