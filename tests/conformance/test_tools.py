"""Descriptions of tools in the formats of OpenAI, LLaMA-Factory and Arrow: training and server render the same."""

import json

import pytest

from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.preference import parse_preference
from maxlm.inference.engine.grammar import Grammars
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.serving.request_parsing import conversation_ids
from maxlm.serving.schema.generation import parse_chat
from maxlm.serving.schema.tools import call_options
from tests.conformance.tool_messages import (
    ASK,
    CHAT,
    DONE,
    SERVED,
    TOKENIZER,
    TOOL,
    WEATHER,
    encoded,
    transformers_text,
)

NULLABLE = {'anyOf': [{'type': 'string'}, {'type': 'null'}], 'default': None}
OPTIONAL = {**TOOL, 'function': {**WEATHER, 'parameters': {'type': 'object', 'properties': {'city': NULLABLE}}}}
ALL_NULL = {'type': 'function', 'function': {'name': 'w', 'description': None}}
# Tools as they are in a file → the tools that the template must render.
TOOLS = {
    'list': ([TOOL], [TOOL]),
    'text': (json.dumps([TOOL]), [TOOL]),
    'texts': ([json.dumps(TOOL)], [TOOL]),
    'bare functions': ([WEATHER], [TOOL]),
    'bare functions as text': (json.dumps([WEATHER]), [TOOL]),
    'Responses API': ([{'type': 'function', **WEATHER}], [TOOL]),
    'parameters as text': (
        [{**TOOL, 'function': {**WEATHER, 'parameters': json.dumps(WEATHER['parameters'])}}],
        [TOOL],
    ),
    'properties as text': (
        [
            {
                **TOOL,
                'function': {
                    **WEATHER,
                    'parameters': {'type': 'object', 'properties': json.dumps(WEATHER['parameters']['properties'])},
                },
            }
        ],
        [TOOL],
    ),
    'order of keys': ([{'function': dict(reversed(WEATHER.items())), 'type': 'function'}], [TOOL]),
    'nulls of Arrow': (
        [
            {
                **TOOL,
                'id': None,
                'function': {
                    **WEATHER,
                    'strict': None,
                    'parameters': {
                        **WEATHER['parameters'],
                        'required': None,
                        'properties': {**WEATHER['parameters']['properties'], 'n': None},
                    },
                },
            }
        ],
        [TOOL],
    ),
    'default of a type that allows null': ([OPTIONAL], [OPTIONAL]),
    'default of another type': (
        [{**TOOL, 'function': {**WEATHER, 'parameters': {'properties': {'a': {'type': 'string', 'default': None}}}}}],
        [{**TOOL, 'function': {**WEATHER, 'parameters': {'properties': {'a': {'type': 'string'}}}}}],
    ),
    'nulls of the author': (json.dumps([ALL_NULL]), [ALL_NULL]),
    'two': ([TOOL, {**TOOL, 'function': {'name': 'v'}}], [TOOL, {'type': 'function', 'function': {'name': 'v'}}]),
    'another kind': ([{'type': 'retrieval'}], [{'type': 'retrieval'}]),
    **{f'none as {none!r}': (none, []) for none in (None, [], '', 'null', '[]')},
}


@pytest.mark.parametrize('tools', TOOLS)
def test_tools(tmp_path, tools):
    given, wanted = TOOLS[tools]
    conversation = parse_conversation({'messages': [ASK, DONE], 'tools': given})
    assert list(conversation.tools) == wanted
    text = transformers_text([ASK], wanted or None, add_generation_prompt=True)
    assert (text != transformers_text([ASK], add_generation_prompt=True)) == bool(wanted)
    for key in ('tools', 'functions'):
        assert encoded({'messages': [ASK, DONE], key: given}) == f'{text}Rain.<|im_end|>\n<|endoftext|>'
    assert parse_preference({'prompt': [ASK], 'chosen': 'a', 'rejected': 'b', 'tools': given}).chosen.tools == tuple(
        wanted
    )
    path = tmp_path / 'p.jsonl'
    path.write_text(json.dumps({'messages': [ASK], 'tools': given}))
    assert [TOKENIZER.decode(ids) for ids in read_prompts(str(path), CHAT, 10_000).ids] == [text]
    # The server takes tools of OpenAI's API only.
    functions = (
        [tool.get('function', {}) for tool in given or () if isinstance(tool, dict)] if type(given) is list else ()
    )
    if functions and all(isinstance(function.get('parameters', {}), dict) and function for function in functions):
        request = parse_chat(json.dumps({'messages': [ASK], 'tools': given}).encode(), max_context=1000)
        options = call_options(request.tools, None, None)
        shown = options.tools if options else ()
        if options:
            # Nulls of Arrow would make the schema of the arguments invalid.
            Grammars(TOKENIZER, [TOKENIZER.end_of_document]).compile(options.grammar)
        assert TOKENIZER.decode(conversation_ids(request.messages, SERVED, tools=shown)[0]) == text


@pytest.mark.parametrize(
    ('tools', 'words'),
    [
        ('w', "'tools' is a text that is not JSON"),
        ('{}', "'tools' must be a list, not dict"),
        (3, "'tools' must be a list, not int"),
        (['w'], "'tools[0]' is a text that is not JSON"),
        ([[]], "'tools[0]' must be an object, not list"),
        ([{'function': 'w'}], "'tools[0].function' is a text that is not JSON"),
        ([{'name': 'w', 'parameters': '{'}], "'tools[0].function.parameters' is a text that is not JSON"),
        ([{'name': 'w', 'parameters': [1]}], "'tools[0].function.parameters' must be an object, not list"),
        ([{'name': 'w', 'parameters': {'maximum': float('inf')}}], "'tools[0]' is not JSON: JSON has no NaN"),
    ],
)
def test_broken_tools_are_errors(tools, words):
    with pytest.raises(ValueError) as info:
        parse_conversation({'messages': [ASK, DONE], 'tools': tools})
    assert words in str(info.value)
