"""Conversations from JSONL, Parquet and Hub data sets with standard and custom names of fields and roles."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.field_names import parse_roles
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.record_formats import find_format
from maxlm.errors import InputError

QUESTION, ANSWER = {'role': 'user', 'content': 'q ü'}, {'role': 'assistant', 'content': 'a'}
OWN = [{'role': 'human', 'content': 'q ü'}, {'role': 'bot', 'content': 'a'}]
OWN_SHAREGPT = [{'from': 'customer', 'value': 'q ü'}, {'from': 'bot', 'value': 'a'}]
ROLES = (('human', 'user'), ('customer', 'user'), ('bot', 'assistant'))
PARTS = {'prompt': [QUESTION], 'completion': [ANSWER]}


@pytest.fixture(params=['jsonl', 'parquet', 'hub'])
def write(request, tmp_path):
    """Returns a function that writes records in a format and returns the input."""

    def write(records):
        if request.param == 'jsonl':
            (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, records)))
            return tmp_path / 'x.jsonl'
        if request.param == 'parquet':
            pq.write_table(pa.Table.from_pylist(records), tmp_path / 'x.parquet')
            return tmp_path / 'x.parquet'
        datasets = pytest.importorskip('datasets', reason='the extra hub')
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(records).save_to_disk(tmp_path / 'set')
        return f'hf:{tmp_path / "set"}'

    return write


def format_of(path, **options):
    return find_format('auto', find_inputs([path]), text_key='text', **options)


@pytest.mark.parametrize(
    ('record', 'options'),
    [
        ({'messages': [QUESTION, ANSWER], 'id': 3}, {}),
        ({'messages': OWN}, {'roles': ROLES}),
        ({'dialog': OWN, 'text': 'other'}, {'roles': ROLES, 'messages_field': 'dialog'}),
        ({'dialog': OWN_SHAREGPT, 'messages': [ANSWER]}, {'roles': ROLES, 'messages_field': 'dialog'}),
        ({'instruction': 'q ü', 'input': None, 'output': 'a'}, {}),
        ({'messages': json.dumps([QUESTION, ANSWER])}, {}),
        ({'dialog': json.dumps(OWN_SHAREGPT), 'messages': 'x'}, {'roles': ROLES, 'messages_field': 'dialog'}),
        ({'prompt': json.dumps(OWN[:1]), 'completion': json.dumps(OWN[1])}, {'roles': ROLES}),
        ({'prompt': 'q ü', 'completion': [ANSWER], 'messages': None}, {}),
        (PARTS, {}),
        ({'prompt': OWN[:1], 'completion': OWN[1:]}, {'roles': ROLES}),
    ],
)
def test_conversations(write, read, record, options):
    path = write([record, record])
    assert format_of(path, messages_field=options.get('messages_field', '')) == 'auto'
    for document in read(path, format='auto', **options):
        assert document.conversation.messages == (QUESTION, ANSWER)
        assert document.conversation.learned == (False, True)
    assert len(read(path, format='auto', **options)) == 2


def test_only_the_completion_of_a_prompt_is_a_target(write, read):
    path = write([{'prompt': 'q ü ', 'completion': 'a', 'n': 3}])
    assert format_of(path) == 'auto'
    for name in ('auto', 'chat'):
        (document,) = read(path, format=name)
        assert (document.text, document.learned_from, document.conversation) == ('q ü a', 4, None)


def test_texts_with_json_are_texts(write, read):
    texts = {'prompt': '[{"role" : "bot"}]', 'completion': '[{"role" : "human", "text": "x"}]'}
    (document,) = read(write([texts]), format='auto', roles=ROLES[:1])
    assert (document.text, document.conversation) == ('[{"role" : "bot"}][{"role" : "human", "text": "x"}]', None)


def test_preference_pairs(write, read):
    path = write([{'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}])
    assert format_of(path) == 'preference'
    (document,) = read(path, format='preference')
    assert document.preference.chosen.messages[-1] == ANSWER


def test_only_the_completion_of_a_conversation_is_a_target():
    entry = {'prompt': [QUESTION, ANSWER, QUESTION], 'completion': [ANSWER, QUESTION, ANSWER], 'system': 'Be kind.'}
    conversation = parse_conversation(entry)
    assert [message['role'] for message in conversation.messages] == ['system', *['user', 'assistant'] * 3]
    assert conversation.learned == (False, False, False, False, True, False, True)


@pytest.mark.parametrize(
    ('record', 'options', 'message'),
    [
        ({'body': 'a', 'id': 3}, {'format': 'text'}, "'text'; .*--text-field"),
        ({'body': 'a', 'id': 3}, {'format': 'chat'}, 'no (column of a )?conversation'),
        (
            {'body': 'a', 'id': 3},
            {'format': 'auto', 'messages_field': 'dialog'},
            "'dialog'.*set --messages-field to the",
        ),
    ],
)
def test_errors_of_a_missing_field_list_the_fields_found(write, bad_records, record, options, message):
    ((_, reason),) = bad_records(write([record]), **options)
    assert re.search(message, reason), reason
    assert 'it has body, id' in reason


@pytest.mark.parametrize(
    ('record', 'reason'),
    [
        ({'prompt': 'q', 'completion': ''}, "'completion' is empty"),
        ({'prompt': 'q', 'completion': 'a', 'label': False}, "'label' marks completions as good or bad"),
        ({'prompt': 'q', 'completion': [QUESTION]}, 'must begin with a message of the assistant'),
        ({'prompt': 3, 'completion': [ANSWER]}, "'prompt' must be a list of objects"),
        ({'prompt': 'q', 'completion': 'a\ud800'}, 'surrogate'),
    ],
)
def test_errors_of_completions_give_the_reason(tmp_path, bad_records, record, reason):
    (tmp_path / 'x.jsonl').write_text(json.dumps(record))
    ((name, message),) = bad_records(tmp_path / 'x.jsonl', format='auto')
    assert name == 'x.jsonl:1'
    assert reason in message


def test_roles_are_read_from_the_command_line():
    assert parse_roles('user=human, assistant=bot,user=customer') == (
        ('human', 'user'),
        ('bot', 'assistant'),
        ('customer', 'user'),
    )
    assert parse_roles('') == ()
    for invalid in ('human', 'human=user', 'user=', 'user=a,assistant=a', ','):
        with pytest.raises(InputError, match='--roles='):
            parse_roles(invalid)
