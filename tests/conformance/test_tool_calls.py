"""Tool calls in the formats of OpenAI, Transformers, LLaMA-Factory and Arrow: training and server render the same."""

import json

import pytest

from maxlm.cli.setup.prepare import main as prepare
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.template import ChatTemplate
from maxlm.data.dataset.records import load_manifest
from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.document import Document
from maxlm.data.documents.preference import parse_preference
from maxlm.errors import InputError
from maxlm.inference.prompts import chat_prompt
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.serving.schema.errors import ApiError
from tests.conformance.tool_messages import (
    ASK,
    BOTH,
    CALLED,
    CHAT,
    DONE,
    EMPTY,
    MODEL,
    OSLO,
    SERVED,
    TOKENIZER,
    TOOL,
    called,
    calling,
    encoded,
    in_api,
    result,
    served,
    transformers_text,
    wrapped,
)

# A message as it is in a file or request → the message that the template must render.
MESSAGES = {
    'string': (calling('{"city": "Oslo"}'), CALLED),
    'object': (calling({'city': 'Oslo'}), CALLED),
    'encoded twice': (calling(json.dumps('{"city": "Oslo"}')), CALLED),
    'spelled otherwise': (calling('\n{"city":\t"\\u004fslo"}\n'), CALLED),
    'empty': (calling(''), EMPTY),
    'blank': (calling(' \n'), EMPTY),
    'null in a string': (calling('null'), EMPTY),
    'null': (calling(None), EMPTY),
    'no arguments': ({'role': 'assistant', 'tool_calls': [{'function': {'name': 'w'}}]}, EMPTY),
    'a null of the author': (calling('{"city": null, "l": [null]}'), called(wrapped('w', {'city': None, 'l': [None]}))),
    'nulls of Arrow': (
        calling({'city': 'Oslo', 'n': None, 'o': {'p': None}}),
        called(wrapped('w', {'city': 'Oslo', 'o': {}})),
    ),
    'nulls in lists': (calling({'l': [None, {'a': None}]}), called(wrapped('w', {'l': [None, {}]}))),
    'unicode': (calling('{"city": "東京 \\ud83d\\ude00 \\"x\\""}'), called(wrapped('w', {'city': '東京 😀 "x"'}))),
    'numbers': (calling('{"a": 1, "b": 1.0, "c": 1e3}'), called(wrapped('w', {'a': 1, 'b': 1.0, 'c': 1000.0}))),
    'identity': (
        {**calling('{}'), 'tool_calls': [{'id': 'c1', 'index': 0, **wrapped('w', '{}')}]},
        called(wrapped('w', {}, id='c1')),
    ),
    'order of keys': (
        {'role': 'assistant', 'tool_calls': [{'function': {'arguments': '{"city": "Oslo"}', 'name': 'w'}}]},
        CALLED,
    ),
    'parameters of Llama 3': (
        {'role': 'assistant', 'tool_calls': [{'name': 'w', 'parameters': {'city': 'Oslo'}}]},
        CALLED,
    ),
    'args of LangChain': ({'role': 'assistant', 'tool_calls': [{'name': 'w', 'args': {'city': 'Oslo'}}]}, CALLED),
    'input of Anthropic': (
        {'role': 'assistant', 'tool_calls': [{'function': {'name': 'w', 'input': '{"city": "Oslo"}'}}]},
        CALLED,
    ),
    'bare call': ({'role': 'assistant', 'tool_calls': BOTH[:1]}, CALLED),
    'calls as text': ({'role': 'assistant', 'tool_calls': json.dumps([wrapped('w', '{"city": "Oslo"}')])}, CALLED),
    'text and calls': ({**calling('{"city": "Oslo"}'), 'content': 'Wait.'}, called(OSLO, content='Wait.')),
    'parts and calls': (
        {**calling('{"city": "Oslo"}'), 'content': [{'type': 'text', 'text': 'Wait.'}]},
        called(OSLO, content='Wait.'),
    ),
    'parallel calls': ({'role': 'assistant', 'tool_calls': BOTH}, called(OSLO, wrapped('v', {}))),
    'older call': (
        {'role': 'assistant', 'content': None, 'function_call': {'name': 'w', 'arguments': '{"city": "Oslo"}'}},
        CALLED,
    ),
    'older call as text': ({'role': 'assistant', 'function_call': json.dumps(BOTH[0])}, CALLED),
    'fields of an API response': (
        {**calling('{"city": "Oslo"}'), 'refusal': None, 'function_call': None, 'name': None, 'audio': None},
        CALLED,
    ),
    'no calls': ({**DONE, 'tool_calls': None, 'function_call': None, 'name': None, 'tool_call_id': None}, DONE),
    'empty calls': ({**DONE, 'tool_calls': []}, DONE),
    'weight': ({**DONE, 'weight': None}, DONE),
    'older result': ({'role': 'function', 'name': 'w', 'content': '3'}, {'role': 'tool', 'name': 'w', 'content': '3'}),
    'result with id': (
        {'role': 'tool', 'tool_call_id': 'c1', 'content': '3'},
        {'role': 'tool', 'tool_call_id': 'c1', 'content': '3'},
    ),
    'object as result': (result({'b': 'ü', 'a': [1, None], 'n': None}), result('{"b": "ü", "a": [1, null]}')),
    'list as result': (result([{'city': 'Oslo'}, 3]), result('[{"city": "Oslo"}, 3]')),
    'list of files': (result([{'type': 'file', 'name': 'a'}]), result('[{"type": "file", "name": "a"}]')),
    'nothing as result': (result([]), result('[]')),
    'number as result': (result(21.5), result('21.5')),
    'parts as result': (result([{'type': 'text', 'text': '2'}, {'type': 'text', 'text': '1'}]), result('21')),
}
# The same in ShareGPT's format, which the server does not read.
SHAREGPT = {
    'call': ({'from': 'function_call', 'value': json.dumps(BOTH[0])}, CALLED),
    'call as object': ({'from': 'function_call', 'value': BOTH[0]}, CALLED),
    'string arguments': (
        {'from': 'function_call', 'value': '{"name": "w", "arguments": "{\\"city\\": \\"Oslo\\"}"}'},
        CALLED,
    ),
    'calls': ({'from': 'function_call', 'value': json.dumps(BOTH)}, called(OSLO, wrapped('v', {}))),
    'reasoning': (
        {'from': 'function_call', 'value': f'<think>\nHm.\n</think>\n\n{json.dumps(BOTH[0])}'},
        called(OSLO, content='<think>\nHm.\n</think>'),
    ),
    'role of OpenAI': ({'role': 'function_call', 'content': json.dumps(BOTH[0])}, CALLED),
    'Hermes': (
        {'from': 'gpt', 'value': '<tool_call>\n{"name": "w"}\n</tool_call>'},
        {'role': 'assistant', 'content': '<tool_call>\n{"name": "w"}\n</tool_call>'},
    ),
    'observation': ({'from': 'observation', 'value': '{"t": 3}'}, result('{"t": 3}')),
    'function_response': ({'from': 'function_response', 'value': {'t': 3}}, result('{"t": 3}')),
    'tool': ({'from': 'tool', 'value': 'x'}, result('x')),
}


@pytest.mark.parametrize('message', MESSAGES)
def test_all_users_of_a_message_render_it_equally(tmp_path, message):
    given, wanted = MESSAGES[message]
    assert list(parse_conversation({'messages': [ASK, given, DONE]}).messages) == [ASK, wanted, DONE]
    text = transformers_text([ASK, wanted, ASK], add_generation_prompt=True)
    assert text != transformers_text([ASK, called(wrapped('x', {})), ASK], add_generation_prompt=True)
    assert encoded({'messages': [ASK, given, ASK, DONE]}) == f'{text}Rain.<|im_end|>\n<|endoftext|>'
    assert served([ASK, given, ASK]) == text
    assert TOKENIZER.decode(chat_prompt(MODEL, [ASK, given, ASK])) == text
    path = tmp_path / 'p.jsonl'
    path.write_text(
        ''.join(
            json.dumps(entry) + '\n'
            for entry in ({'prompt': [ASK, given, ASK]}, {'messages': json.dumps([ASK, given, ASK]), 'prompt': None})
        )
    )
    assert [TOKENIZER.decode(ids) for ids in read_prompts(str(path), CHAT, 10_000).ids] == [text, text]


def test_templates_get_the_same_fields_in_training_and_in_the_server():
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m | tojson(sort_keys=true) }}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    )
    chat = ChatEncoder(TOKENIZER, ChatTemplate(source, name='test'))
    given, wanted = zip(*MESSAGES.values(), strict=True)
    # Transformers gives the reasoning all names that templates know.
    reasonings = [{**DONE, name: 'r'} for name in ('reasoning_content', 'thinking', 'reasoning')]
    given, wanted = ([*turns, *reasonings] for turns in (given, wanted))
    text = transformers_text(wanted, template=source)
    assert '"reasoning": "r", "reasoning_content": "r", "role": "assistant", "thinking": "r"' in text
    assert served(given, SERVED._replace(chat=chat)) == text
    conversation = parse_conversation({'messages': given})
    assert chat.render_prompt(conversation.messages).text == text


def test_a_template_that_omits_calls_is_an_error():
    source = (
        "{{ tools | tojson }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = ChatEncoder(TOKENIZER, ChatTemplate(source, name='test'))

    def encode(**record):
        (found,) = chat.encode_documents([Document('x', 's', conversation=parse_conversation(record))])
        return found

    for given in (calling('{}'), {'role': 'assistant', 'function_call': BOTH[0]}):
        error = encode(messages=[ASK, given], tools=[TOOL])
        assert isinstance(error, ChatError)
        assert "the chat template does not show the tool call 'w'" in str(error)
        # Only turns with loss matter.
        assert not isinstance(encode(messages=[ASK, {**given, 'weight': 0}, ASK, DONE]), ChatError)


@pytest.mark.parametrize('message', {**MESSAGES, **SHAREGPT})
def test_preferences_contain_the_same_messages(message):
    given, wanted = {**MESSAGES, **SHAREGPT}[message]
    turns = [ASK, given, ASK]
    pair = {'chosen': [*turns, DONE], 'rejected': [*turns, {**DONE, 'content': 'Sun.'}]}
    preference = parse_preference({key: json.dumps(value) for key, value in pair.items()})
    assert preference == parse_preference(pair)
    assert list(preference.chosen.messages) == [ASK, wanted, ASK, DONE]
    # The common beginning is found in messages of one form.
    assert preference.prompt == 3
    assert parse_preference({**pair, 'rejected': [ASK, in_api(wanted), *pair['rejected'][2:]]}) == preference
    # The prompt of an answer with a label.
    labeled = parse_preference({'prompt': turns, 'completion': 'Rain.', 'label': 1})
    assert list(labeled.chosen.messages) == [ASK, wanted, ASK, DONE]


def test_calls_are_answers_of_preferences():
    pair = {'prompt': 'q', 'chosen': calling('{"city": "Oslo"}'), 'rejected': calling('{"city": "Rome"}')}
    preference = parse_preference(pair)
    assert preference.has_answers
    assert (
        preference.text
        == 'q\n\n\n\n{"name": "w", "arguments": {"city": "Oslo"}}\n\n\n\n{"name": "w", "arguments": {"city": "Rome"}}'
    )


@pytest.mark.parametrize('message', SHAREGPT)
def test_messages_of_sharegpt(message):
    given, wanted = SHAREGPT[message]
    turns = [{'from': 'human', 'value': 'Weather in Oslo?'}, given, {'from': 'gpt', 'value': 'Rain.'}]
    for value in (turns, json.dumps(turns), list(map(json.dumps, turns))):
        assert list(parse_conversation({'conversations': value}).messages) == [ASK, wanted, DONE]


BROKEN = {
    'text': (calling('not json'), 'tool_calls[0]', 'has arguments that are not JSON'),
    'Python': (calling("{'city': 'Oslo'}"), 'tool_calls[0]', 'has arguments that are not JSON'),
    'truncated': (calling('{"city": "Os'), 'tool_calls[0]', 'has arguments that are not JSON'),
    'list': (
        calling('[1]'),
        'tool_calls[0]',
        'must have an object or a string with a JSON object as arguments, not a list',
    ),
    'number': (calling('3'), 'tool_calls[0]', 'not a number'),
    'boolean': (calling('true'), 'tool_calls[0]', 'not a boolean'),
    'list object': (calling([1]), 'tool_calls[0]', 'not a list'),
    'text twice': (calling('"Oslo"'), 'tool_calls[0]', 'has arguments that are not JSON'),
    'NaN': (calling('{"a": NaN}'), 'tool_calls[0]', 'JSON has no NaN'),
    'overflow': (calling('{"a": 1e400}'), 'tool_calls[0]', 'JSON has no NaN, Infinity'),
    'surrogate': (calling('{"a": "\\ud800"}'), 'tool_calls[0]', 'surrogate'),
    'name': ({'role': 'assistant', 'function_call': '{"name": "\\ud800"}'}, 'function_call', 'a name or id'),
    'second call': (called(OSLO, wrapped('w', '{')), 'tool_calls[1]', 'has arguments that are not JSON'),
    'no name': ({'role': 'assistant', 'tool_calls': [{'function': {'arguments': '{}'}}]}, 'tool_calls[0]', 'a name'),
    'other name of the arguments': (
        {'role': 'assistant', 'tool_calls': [{'function': {'name': 'w', 'kwargs': {'city': 'Oslo'}}}]},
        'tool_calls[0]',
        "has no 'arguments', but 'kwargs'",
    ),
    'no function': ({'role': 'assistant', 'tool_calls': [3]}, 'tool_calls[0]', 'must have a function'),
    'calls': ({'role': 'assistant', 'tool_calls': 'w()'}, 'tool_calls', 'a text that is not JSON'),
    'number of calls': ({'role': 'assistant', 'tool_calls': 3}, 'tool_calls', 'must be a list of calls'),
    'older call': (
        {'role': 'assistant', 'function_call': {'name': 'w', 'arguments': '{'}},
        'function_call',
        'not JSON',
    ),
    'both': ({**CALLED, 'function_call': BOTH[0]}, 'function_call', "is given in addition to 'tool_calls'"),
    'result': ({'role': 'tool'}, 'content', 'is missing'),
    'number of results': (result(float('nan')), 'content', 'JSON has no NaN'),
    'image': (result([{'type': 'image_url', 'image_url': 'x'}]), 'content[0]', "found type 'image_url'"),
}


@pytest.mark.parametrize('case', BROKEN)
def test_broken_messages_are_errors_that_name_the_field(case):
    message, field, words = BROKEN[case]
    with pytest.raises(ValueError, match=r"message 1 of 'messages'") as info:
        parse_conversation({'messages': [ASK, message, DONE]})
    assert field in str(info.value)
    assert words in str(info.value)
    assert '\n' not in str(info.value)
    with pytest.raises(ApiError) as info:
        served([ASK, message, ASK])
    assert (info.value.status, info.value.param) == (400, f'messages[1].{field}')
    assert words in str(info.value.message)


@pytest.mark.parametrize('value', ['I call w.', '{"name": "w", "arguments": "{"}', '{"arguments": {}}', '[1]'])
def test_broken_calls_of_sharegpt_are_errors(value):
    record = {'conversations': [ASK, {'from': 'function_call', 'value': value}]}
    with pytest.raises(ValueError, match="the 'value' of message 1 of 'conversations' must be a call or calls as JSON"):
        parse_conversation(record)


def test_broken_records_are_counted(tmp_path):
    records = [{'messages': [ASK, calling(arguments), DONE]} for arguments in ('{}', 'not json', '')]
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, records)))
    arguments = ['--input', tmp_path / 'x.jsonl', '--tokenizer', 'bytes', '--output', tmp_path / 'data', '--workers', 1]
    arguments = [*map(str, arguments), '--validation-fraction', '0']
    with pytest.raises(InputError, match=r"x.jsonl:2: the 'tool_calls\[0\]' of message 1 of 'messages' has arguments"):
        prepare(arguments)
    assert prepare([*arguments, '--skip-bad-records']) == 0
    assert [entry['name'] for entry in load_manifest(tmp_path / 'data').left_out] == ['x.jsonl:2']
