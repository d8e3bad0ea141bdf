import json

import pytest

from maxlm.data.documents.preference import has_preference, parse_preference
from tests.conftest import ROOT


def user(content):
    return {'role': 'user', 'content': content}


def assistant(content, **rest):
    return {'role': 'assistant', 'content': content, **rest}


GOOD, BAD = [user('Hello'), assistant('Hi')], [user('Hello'), assistant('No')]
RECORDS = {
    'texts': {'prompt': 'Hello', 'chosen': 'Hi', 'rejected': 'No'},
    'question': {'question': 'Hello', 'chosen': 'Hi', 'rejected': 'No'},
    'instruction': {'instruction': 'Hello', 'input': '', 'chosen': 'Hi', 'rejected': 'No'},
    'messages': {'prompt': GOOD[:1], 'chosen': GOOD[1:], 'rejected': BAD[1:]},
    'a message': {'prompt': GOOD[:1], 'chosen': GOOD[1], 'rejected': BAD[1]},
    'text and message': {'prompt': 'Hello', 'chosen': GOOD[1], 'rejected': 'No'},
    'conversations': {'chosen': GOOD, 'rejected': BAD},
    'conversations with prompt and messages': {'prompt': 'Hello ', 'chosen': GOOD, 'rejected': BAD, 'messages': GOOD},
    'dialogues': {'chosen': '\n\nHuman: Hello\n\nAssistant: Hi', 'rejected': '\n\nHuman: Hello\n\nAssistant: No'},
    'dialogue': {'prompt': '\n\nHuman: Hello\n\nAssistant:', 'chosen': 'Hi', 'rejected': 'No'},
    'stripped dialogues': {'chosen': 'Human: Hello\n\nAssistant: Hi', 'rejected': 'Human: Hello\n\nAssistant: No'},
    'stripped dialogue': {'prompt': 'Human: Hello\n\nAssistant:', 'chosen': 'Hi', 'rejected': 'No'},
    'dialogues of Windows': {
        'chosen': '\r\n\r\nHuman: Hello\r\n\r\nAssistant: Hi',
        'rejected': '\r\n\r\nHuman: Hello\r\n\r\nAssistant: No',
    },
    'messages without lists': {'prompt': GOOD[0], 'chosen': GOOD[1], 'rejected': BAD[1]},
    'ShareGPT': {
        'conversations': [{'from': 'human', 'value': 'Hello'}],
        'chosen': {'from': 'gpt', 'value': 'Hi'},
        'rejected': {'from': 'gpt', 'value': 'No'},
    },
}


@pytest.mark.parametrize('record', RECORDS.values(), ids=RECORDS)
def test_all_formats_give_the_same_preference(record):
    preference = parse_preference(record)
    assert (list(preference.chosen.messages), list(preference.rejected.messages)) == (GOOD, BAD)
    assert preference.chosen.learned == preference.rejected.learned == (False, True)
    assert (preference.prompt, preference.text, preference.has_answers) == (1, 'Hello\n\nHi\n\nNo', True)
    # Swapped responses are a different preference.
    swapped = parse_preference({**record, 'chosen': record['rejected'], 'rejected': record['chosen']})
    assert (swapped.chosen, swapped.rejected) == (preference.rejected, preference.chosen)


RECORDS_OF_SHAREGPT = [{'from': 'human', 'value': 'Hello'}, {'from': 'gpt', 'value': 'Hi'}]
LABELED = {
    'texts': {'prompt': 'Hello', 'completion': 'Hi', 'label': True},
    'messages': {'prompt': GOOD[:1], 'completion': GOOD[1:], 'label': True},
    'a message': {'prompt': GOOD[:1], 'completion': GOOD[1], 'label': True},
    'dialogue': {'prompt': '\n\nHuman: Hello\n\nAssistant:', 'completion': 'Hi', 'label': True},
}


@pytest.mark.parametrize('record', LABELED.values(), ids=LABELED)
def test_answers_with_labels(record):
    preference = parse_preference(record)
    assert (list(preference.chosen.messages), preference.rejected) == (GOOD, None)
    assert preference.chosen.learned == (False, True)
    assert (preference.prompt, preference.text, preference.has_answers) == (1, 'Hello\n\nHi', True)
    other = parse_preference({**record, 'label': False})
    assert (other.chosen, other.rejected) == (None, preference.chosen)
    # A pair with a label is a pair.
    assert parse_preference({**record, **RECORDS['texts']}).rejected is not None


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'completion': GOOD}, "'completion' must begin with a message of the assistant"),
        ({'prompt': GOOD}, 'the prompt ends with an assistant message'),
        ({'prompt': []}, "'prompt' contains no messages"),
    ],
)
def test_malformed_answers_with_labels(change, message):
    with pytest.raises(ValueError, match=message):
        parse_preference({**LABELED['texts'], **change})


def test_documented_answers_with_labels():
    lines = (ROOT / 'docs/posttraining.md').read_text().splitlines()
    found = [parse_preference(json.loads(line)) for line in lines if line.startswith('{"prompt"')]
    assert [preference.rejected is None for preference in found] == [True, False]


def test_the_label_of_a_conversation_marks_its_last_message():
    for record in (
        {'messages': GOOD},
        {'conversations': RECORDS_OF_SHAREGPT},
        {'instruction': 'Hello', 'output': 'Hi'},
    ):
        assert parse_preference({**record, 'label': True}).chosen == parse_preference(LABELED['texts']).chosen
    turns = [*GOOD, user('a'), assistant('b')]
    preference = parse_preference({'messages': turns, 'label': False})
    assert (preference.prompt, preference.rejected.learned) == (3, (False, False, False, True))
    for messages in (GOOD[1:], [*GOOD, user('a')], []):
        with pytest.raises(ValueError, match="'label' marks the last message, which must be an answer"):
            parse_preference({'messages': messages, 'label': True})


def test_only_turns_after_the_common_prefix_are_targets():
    turns = [user('a'), assistant('b'), user('c')]
    chosen, rejected = [*turns, assistant('d')], [*turns, assistant('e'), user('f'), assistant('g')]
    for record in ({'chosen': chosen, 'rejected': rejected}, {'prompt': 'c', 'chosen': chosen, 'rejected': rejected}):
        preference = parse_preference(record)
        assert preference.prompt == 3
        assert preference.chosen.learned == (False, False, False, True)
        assert preference.rejected.learned == (False, False, False, True, False, True)
    dialogues = ['\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ' + answer for answer in ('d', 'Human: e')]
    preference = parse_preference({'chosen': dialogues[0], 'rejected': dialogues[1]})
    assert [message['content'] for message in preference.rejected.messages] == ['a', 'b', 'c', 'Human: e']
    assert preference.chosen.learned == (False, False, False, True)
    # One response is a prefix of the other.
    preference = parse_preference({'chosen': chosen[:2], 'rejected': chosen})
    assert (preference.prompt, preference.rejected.learned) == (1, (False, True, False, True))
    # Equal conversations still have a response.
    preference = parse_preference({'chosen': chosen, 'rejected': chosen})
    assert (preference.prompt, preference.chosen) == (3, preference.rejected)


def test_other_fields_of_a_record():
    calls = [{'type': 'function', 'function': {'name': 'f', 'arguments': {}}}]
    record = {
        'system': 'S',
        'tools': [{'name': 'f'}],
        'instruction': 'i',
        'input': 'j',
        'chosen': {'role': 'assistant', 'content': None, 'tool_calls': calls},
        'rejected': ' No \n\nHuman: x',
    }
    preference = parse_preference(record)
    assert [message['content'] for message in preference.chosen.messages] == ['S', 'i\n\nj', '']
    assert preference.rejected.messages[-1]['content'] == ' No \n\nHuman: x'
    assert preference.chosen.tools == preference.rejected.tools == ({'type': 'function', 'function': {'name': 'f'}},)
    assert preference.has_answers
    # With a prompt, only blank lines mark an answer as a dialogue.
    answer = 'Human: x\n\nAssistant: y'
    assert parse_preference({**record, 'rejected': answer}).rejected.messages[-1]['content'] == answer
    weights = {'prompt': 'a', 'chosen': [assistant('b', weight=0), user('c'), assistant('d')], 'rejected': 'e'}
    assert parse_preference(weights).chosen.learned == (False, False, False, True)


@pytest.mark.parametrize('empty', ['', ' \n', [assistant('')]])
@pytest.mark.parametrize('key', ['chosen', 'rejected'])
def test_empty_answers_are_detected(empty, key):
    assert not parse_preference({**RECORDS['texts'], key: empty}).has_answers


@pytest.mark.parametrize('record', [{'chosen': 'a'}, {'rejected': 'a'}, {'text': 'a'}, ['chosen', 'rejected'], 3, None])
def test_records_without_a_preference(record):
    assert not has_preference(record)
    assert parse_preference(record) is None


@pytest.mark.parametrize(
    ('record', 'reason'),
    [
        ({'chosen': 'a', 'rejected': 'b'}, 'no prompt; add one of prompt'),
        ({'prompt': None, 'chosen': 'a', 'rejected': 'b'}, 'no prompt; add'),
        ({'prompt': 3, 'chosen': 'a', 'rejected': 'b'}, "'prompt' must be a text, a message or messages; found 3"),
        ({'prompt': 'p', 'chosen': 3, 'rejected': 'b'}, "'chosen' must be a text, a message or messages; found 3"),
        ({'prompt': 'p', 'chosen': 'a', 'rejected': None}, "'rejected' must be a text, a message or messages"),
        ({'prompt': 'p', 'chosen': [], 'rejected': 'b'}, "'chosen' contains no messages"),
        ({'prompt': 'p', 'chosen': [{'role': 'robot', 'content': 'a'}], 'rejected': 'b'}, "message 0 of 'chosen' has"),
        ({'prompt': 'p', 'chosen': [{'from': 'robot', 'value': 'a'}], 'rejected': 'b'}, "message 0 of 'chosen' is"),
        ({'prompt': GOOD, 'chosen': 'a', 'rejected': 'b'}, 'ends with an assistant message'),
        ({'prompt': 'other', 'chosen': GOOD, 'rejected': BAD}, 'a prompt that differs'),
        ({'prompt': 'Hello', 'chosen': GOOD, 'rejected': 'No'}, 'begins with the prompt, and the other'),
        ({'chosen': GOOD, 'rejected': [user('Bye'), assistant('No')]}, 'differ before an assistant answer'),
        ({'chosen': [*GOOD, user('a')], 'rejected': [*GOOD, user('b')]}, 'differ before an assistant answer'),
        ({'chosen': GOOD[:1], 'rejected': BAD}, 'differ before an assistant answer'),
        ({'prompt': 'p', 'chosen': [assistant('a', weight=0)], 'rejected': 'b'}, "'chosen': no assistant message"),
        ({'prompt': 'p', 'chosen': 'a', 'rejected': '\ud800'}, "'rejected': contains an unpaired surrogate"),
        ({'prompt': 'p', 'chosen': 'a', 'rejected': 'b', 'tools': 'x'}, "'tools' is a text that is not JSON"),
    ],
)
def test_errors_give_the_reason(record, reason):
    with pytest.raises(ValueError, match=reason) as info:
        parse_preference(record)
    assert '\n' not in str(info.value)
