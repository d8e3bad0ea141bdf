"""Tests the encoding of tool results as the continuation of a conversation."""

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.template import CHATML, LLAMA3, ChatTemplate
from maxlm.data.chat.tool_results import encode_tool_results
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer

# Qwen shows results in one message of the user.
QWEN = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
CALLS = [('add', {'a': 1}), ('add', {'a': 2})]


def encoder(source, *tokens):
    return ChatEncoder(bytes_tokenizer().with_special_tokens(tokens), ChatTemplate(source, name='test'))


@pytest.mark.parametrize(
    ('source', 'text'),
    [
        (CHATML, '\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n'),
        (
            QWEN,
            '\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n<|im_end|>\n</tool_response>'
            '<|im_end|>\n<|im_start|>assistant\n',
        ),
    ],
)
def test_results_follow_the_end_of_the_turn(source, text):
    chat = encoder(source, '<|im_start|>', '<|im_end|>')
    ids = encode_tool_results(chat, CALLS, ['2', '<|im_end|>'])
    assert chat.tokenizer.decode(ids) == text
    # The text of a special token in a result is no special token.
    assert (ids == chat.end_of_turn).sum() == text.count('<|im_end|>') - 1


def test_templates_without_tools():
    chat = encoder(LLAMA3.replace('{{- bos_token }}', ''), '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>')
    with pytest.raises(ChatError, match='shows no tool calls'):
        encode_tool_results(chat, CALLS, ['2', '3'])
    # The token that ends the turn of the user is not the end of the calls.
    end = "{{- '<|im_end|>' }}"
    other = CHATML.replace(end, "{{- '<|eom|>' if message.tool_calls else '<|im_end|>' }}", 1)
    with pytest.raises(ChatError, match='by another token'):
        encode_tool_results(encoder(other, '<|im_start|>', '<|im_end|>', '<|eom|>'), CALLS, ['2', '3'])
    # This template removes the calls once it has results.
    forgetful = CHATML.replace(
        'message.tool_calls or []', '([] if messages[-1].role == "tool" else message.tool_calls) or []'
    )
    with pytest.raises(ChatError, match='changes earlier messages'):
        encode_tool_results(encoder(forgetful, '<|im_start|>', '<|im_end|>'), CALLS, ['2', '3'])
