import pytest

from maxlm.data.documents.conversation import parse_conversation

HELLO = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]
RECORDS = {
    'OpenAI': {'messages': HELLO},
    'OpenAI in parts': {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hello'}]}, HELLO[1]]},
    'ShareGPT': {'conversations': [{'from': 'human', 'value': 'Hello'}, {'from': 'gpt', 'value': 'Hi'}], 'id': 'a'},
    'Alpaca': {'instruction': 'Hello', 'input': '', 'output': 'Hi'},
    'Alpaca without input': {'instruction': 'Hello', 'output': 'Hi'},
}


@pytest.mark.parametrize('record', RECORDS.values(), ids=RECORDS)
def test_all_formats_give_the_same_conversation(record):
    conversation = parse_conversation(record)
    assert list(conversation.messages) == HELLO
    assert conversation.learned == (False, True)
    assert conversation.text == 'Hello\n\nHi'


def test_other_fields_of_a_record():
    calls = [{'type': 'function', 'function': {'name': 'f', 'arguments': {}}}]
    called = {'role': 'assistant', 'content': None, 'tool_calls': calls}
    answer = {'role': 'function', 'name': 'f', 'content': '3'}
    conversation = parse_conversation({'messages': [*HELLO, called, answer, HELLO[1]], 'tools': [{'name': 'f'}]})
    assert conversation.messages[2] == {'role': 'assistant', 'content': '', 'tool_calls': calls}
    assert conversation.messages[3]['role'] == 'tool'
    assert conversation.learned == (False, True, True, False, True)
    assert conversation.tools == ({'type': 'function', 'function': {'name': 'f'}},)
    context = parse_conversation({'instruction': 'Add.', 'input': '3 4', 'output': '7', 'system': 'Be brief.'})
    assert [message['content'] for message in context.messages] == ['Be brief.', 'Add.\n\n3 4', '7']
    shared = {'system': 'S', 'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]}
    assert [message['role'] for message in parse_conversation(shared).messages] == ['system', 'user', 'assistant']


def test_messages_with_weight_0_are_not_targets():
    messages = [HELLO[0], {**HELLO[1], 'weight': 0}, HELLO[0], {**HELLO[1], 'weight': 1}]
    conversation = parse_conversation({'messages': messages})
    assert conversation.learned == (False, False, False, True)
    assert list(conversation.messages) == HELLO * 2


@pytest.mark.parametrize('record', [{'text': 'a'}, {'instruction': 'a'}, ['messages'], 'messages', 3, None])
def test_records_without_a_conversation(record):
    assert parse_conversation(record) is None


@pytest.mark.parametrize(
    ('record', 'reason'),
    [
        ({'messages': 'Hello'}, "'messages' must be a list of objects"),
        ({'messages': ['Hello']}, "'messages' must be a list of objects"),
        ({'messages': []}, 'no assistant message to train on'),
        ({'messages': HELLO[:1]}, 'no assistant message to train on'),
        ({'messages': [{**HELLO[1], 'weight': 0}]}, 'no assistant message to train on'),
        ({'messages': [{**HELLO[1], 'weight': 0.5}]}, 'message 0 .* weight 0.5'),
        ({'messages': [HELLO[0], {'role': 'bot', 'content': 'Hi'}]}, "message 1 of 'messages' has the role 'bot'"),
        ({'messages': [HELLO[0], {'role': 'assistant'}]}, "the 'content' of message 1 of 'messages' is missing"),
        (
            {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
            r"the 'content\[0\]' of message 0 .* found type 'image_url'",
        ),
        ({'messages': [HELLO[0], {'role': 'assistant', 'content': '\ud800'}]}, 'unpaired surrogate'),
        ({'messages': HELLO, 'tools': 'f'}, "'tools' is a text that is not JSON"),
        ({'conversations': [{'from': 'me', 'value': 'Hi'}]}, "message 0 of 'conversations' is 'from' 'me'"),
        ({'conversations': [{'from': 'gpt', 'value': 3}]}, "the 'value' of message 0 .* must be text, not int"),
        ({'instruction': 'a', 'output': None}, "'output' is missing"),
    ],
)
def test_errors_give_the_reason(record, reason):
    with pytest.raises(ValueError, match=reason) as info:
        parse_conversation(record)
    assert '\n' not in str(info.value)
