"""The chat template of nanochat: ids and masks of nanochat's own code, with calls of Python and their results.

conversations.json contains conversations with the ids and masks of `RustBPETokenizer.render_conversation`, and the ids
of `render_for_completion`, of nanochat (`nanochat/tokenizer.py` of 2026-07-03, 92d63d4) with the tokenizer of
`files.encoding`.
"""

import json

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.rendered import ChatError
from maxlm.data.chat.template import ChatTemplate
from maxlm.data.chat.token_flags import is_target, token_ids
from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.document import Document
from maxlm.data.documents.messages import parse_messages
from maxlm.huggingface.nanochat.chat_template import TEMPLATE, TOKENS
from maxlm.huggingface.nanochat.tokenizer_pickle import read_tokenizer
from tests.huggingface.nanochat.files import HERE, SPECIAL, save_tokenizer

REFERENCES = json.loads((HERE / 'conversations.json').read_text())
CALL = {'name': 'python', 'arguments': {'code': '6*7'}}


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.pkl'
    save_tokenizer(path)
    return ChatEncoder(read_tokenizer(path), ChatTemplate(TEMPLATE, name='nanochat'))


def assistant(content, *calls):
    return {'role': 'assistant', 'content': content, 'tool_calls': [{'function': call} for call in calls]}


@pytest.mark.parametrize('reference', REFERENCES)
def test_ids_and_mask_are_those_of_nanochat(chat, reference):
    conversation = parse_conversation({'messages': reference['messages']})
    (encoded,) = chat.encode_documents([Document('x', '', conversation=conversation)])
    assert not isinstance(encoded, ChatError)
    # The token after a conversation is that at the start of the next one.
    bos = reference['ids'][0]
    assert token_ids(encoded.tokens).tolist() == [*reference['ids'], bos]
    assert is_target(encoded.tokens).astype(int).tolist() == [*reference['mask'], 0]


@pytest.mark.parametrize('reference', REFERENCES)
def test_prompts_are_those_of_nanochat(chat, reference):
    # Without the last message of the assistant.
    messages = parse_messages(reference['messages'][:-1], 'messages')
    assert chat.encode_prompt(messages).tolist() == reference['completion']


def test_a_result_continues_the_turn_of_its_call(chat):
    start = [{'role': 'user', 'content': 'x'}, assistant('It is ', CALL), {'role': 'tool', 'content': '42'}]
    prompt = chat.render_prompt(parse_messages(start, 'messages'))
    assert prompt.spelled(0, len(prompt.text)) == (
        '<|bos|><|user_start|>x<|user_end|><|assistant_start|>It is <|python_start|>6*7<|python_end|>'
        '<|output_start|>42<|output_end|>'
    )
    whole = parse_messages([*start, assistant('42.'), {'role': 'user', 'content': 'y'}], 'messages')
    ids = chat.encode_prompt(whole).tolist()
    begin = chat.encode_prompt(parse_messages(start, 'messages')).tolist()
    assert ids[: len(begin)] == begin
    assert ids.count(chat.end_of_turn) == 1


@pytest.mark.parametrize(
    ('messages', 'message'),
    [
        ([assistant('', {'name': 'search', 'arguments': {'code': 'x'}})], 'nanochat has one tool'),
        ([assistant('', {'name': 'python', 'arguments': {'query': 'x'}})], 'nanochat has one tool'),
        ([assistant('', {'name': 'python', 'arguments': {'code': 1}})], 'nanochat has one tool'),
        ([assistant('', CALL, CALL)], 'one call per message'),
        ([assistant('', CALL), {'role': 'user', 'content': 'y'}], 'results of calls'),
        ([assistant('no call'), {'role': 'tool', 'content': '42'}], 'results of calls'),
    ],
)
def test_what_nanochat_cannot_express_is_refused(chat, messages, message):
    parsed = parse_messages([{'role': 'user', 'content': 'x'}, *messages], 'messages')
    with pytest.raises(ChatError, match=message):
        chat.render_prompt(parsed)


def test_results_without_a_call_are_refused():
    parts = [{'type': 'text', 'text': 'a'}, {'type': 'python_output', 'text': '1'}, {'type': 'python', 'text': '1'}]
    with pytest.raises(ValueError, match="found type 'python_output'"):
        parse_messages([{'role': 'assistant', 'content': parts}], 'messages')


def test_the_tokens_are_those_of_the_template():
    assert set(ChatTemplate(TEMPLATE, name='nanochat').tokens) == set(TOKENS) == set(SPECIAL)
