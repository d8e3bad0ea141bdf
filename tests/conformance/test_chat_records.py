"""Fields of chat records of other systems: turns without loss, earlier turns, and several chat templates."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.setup import make_chat_recipe
from maxlm.data.chat.template import ChatTemplate
from maxlm.data.documents.conversation import parse_conversation
from maxlm.data.documents.preference import parse_preference
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from tests.conformance.special_tokens import Files, write_tokenizer

ASK, BAD, DONE = (
    {'role': role, 'content': text} for role, text in (('user', 'q'), ('assistant', 'b'), ('assistant', 'd'))
)
TOOL = {'type': 'function', 'function': {'name': 'w', 'description': 'd', 'parameters': {}}}
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}\n"
TOOLS = '\n  {{ tools | tojson }}' + PLAIN


@pytest.mark.parametrize('key', ['weight', 'loss', 'train', 'training'])
@pytest.mark.parametrize('value', [0, 0.0, False])
def test_turns_without_loss(key, value):
    conversation = parse_conversation({'messages': [ASK, {**BAD, key: value}, ASK, {**DONE, key: not value}]})
    assert conversation.learned == (False, False, False, True)
    assert list(conversation.messages) == [ASK, BAD, ASK, DONE]
    # ShareGPT's format, in which Arrow adds nulls to other turns.
    turns = [
        {'from': 'human', 'value': 'q', key: None},
        {'from': 'gpt', 'value': 'b', key: value},
        {'from': 'gpt', 'value': 'd', key: None},
    ]
    assert parse_conversation({'conversations': turns}).learned == (False, False, True)
    with pytest.raises(ValueError, match='no assistant message to train on'):
        parse_conversation({'messages': [ASK, {**BAD, key: value}]})


@pytest.mark.parametrize('key', ['weight', 'loss', 'train', 'training'])
@pytest.mark.parametrize('value', ['false', '0', 0.5, 2, [], {}, float('nan')], ids=repr)
def test_other_values_are_errors(key, value):
    with pytest.raises(
        ValueError, match=f"message 1 of 'messages' has {key} .*; use 1 to train on it, or 0 to exclude"
    ):
        parse_conversation({'messages': [ASK, {**BAD, key: value}]})


def test_earlier_turns_of_alpaca():
    record = {'instruction': 'q', 'input': 'i', 'system': 's', 'history': [['a', 'b'], ['c', 'd']]}
    texts = ['s', 'a', 'b', 'c', 'd', 'q\n\ni', 'o']
    for history in (record['history'], json.dumps(record['history'])):
        conversation = parse_conversation({**record, 'history': history, 'output': 'o'})
        assert [message['content'] for message in conversation.messages] == texts
        assert conversation.learned == (False, False, True, False, True, False, True)
        preference = parse_preference({**record, 'history': history, 'chosen': 'o', 'rejected': 'p'})
        assert [message['content'] for message in preference.chosen.messages] == texts
        assert preference.chosen.learned == (False,) * 6 + (True,)
    for history in (None, [], ''):
        assert len(parse_conversation({**record, 'history': history, 'output': 'o'}).messages) == 3
    for history in ([['a']], [['a', None]], ['a', 'b'], {'a': 'b'}, 3):
        with pytest.raises(ValueError, match="'history' must be a list of pairs of an instruction and an answer"):
            parse_conversation({**record, 'history': history, 'output': 'o'})


@pytest.mark.parametrize('form', ['list', 'object', 'files'])
def test_a_template_for_tools(tmp_path, form):
    named = {'default': PLAIN, 'tool_use': TOOLS}
    kept = [{'name': name, 'template': text} for name, text in named.items()] if form == 'list' else named
    config = {'eos_token': '</s>', **({} if form == 'files' else {'chat_template': kept})}
    path = write_tokenizer(tmp_path / 'a', Files(config)) / 'tokenizer.json'
    if form == 'files':
        (path.parent / 'chat_template.jinja').write_text(PLAIN)
        (path.parent / 'additional_chat_templates').mkdir()
        (path.parent / 'additional_chat_templates' / 'tool_use.jinja').write_text(TOOLS)
    recipe = make_chat_recipe('', tokenizer=str(path), special_tokens=(), window=0)
    tokenizer = recipe.with_tokens(Tokenizer.load(path))
    chat = ChatEncoder(tokenizer, ChatTemplate(recipe.template_for(tokenizer), name='test'))
    theirs = PreTrainedTokenizerFast.from_pretrained(path.parent)
    texts = []
    for tools in ([], [TOOL]):
        texts.append(chat.render_prompt([ASK], tools=tools, add_generation_prompt=False).text)
        assert texts[-1] == theirs.apply_chat_template([ASK], tools=tools or None, tokenize=False)
    assert texts[0] != texts[1]


def test_templates_without_a_default_are_refused(tmp_path):
    config = {'eos_token': '</s>', 'chat_template': [{'name': 'rag', 'template': PLAIN}]}
    path = write_tokenizer(tmp_path / 'a', Files(config)) / 'tokenizer.json'
    with pytest.raises(InputError, match=r"tokenizer_config\.json: no chat template is named default, only 'rag'"):
        make_chat_recipe('', tokenizer=str(path), special_tokens=(), window=0)
    assert make_chat_recipe('chatml', tokenizer=str(path), special_tokens=(), window=0).name == 'chatml'


@pytest.mark.parametrize('name', ['x.json', 'X.JSON', 'x.json.gz'])
def test_json_files_are_no_texts(tmp_path, name):
    (tmp_path / name).write_text(json.dumps([{'instruction': 'q', 'output': 'o'}]))
    for given in (tmp_path / name, f'{tmp_path}/*{name[1:]}'):
        with pytest.raises(InputError, match=rf'{name}: \.json files are not read, .* give hf:{tmp_path} to read'):
            find_inputs([given])
