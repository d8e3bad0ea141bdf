"""Exact answers to the questions of a file, with an engine that returns given answers."""

import json

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.tasks.questions import ask, check_questions
from tests.evaluation.engines import RecitingEngine

TOKENIZER = bytes_tokenizer()
CHAT_TOKENIZER = TOKENIZER.with_special_tokens(['<|im_start|>', '<|im_end|>'])
LINES = [
    {'messages': [{'role': 'user', 'content': 'Who founded Duril?'}], 'answer': 'It was founded by Miru.'},
    {'prompt': 'When?', 'answer': ['In May.', 'May']},
    {'prompt': 'Where?', 'answer': 'Here.'},
]
SAID = {'Who founded Duril?': ' It was founded by Miru.\n', 'When?': 'May', 'Where?': 'There.'}


def turn(question):
    return f'<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'questions.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in LINES))
    return str(path)


def asked(file, answers, encoder, **options):
    tokenizer = encoder if encoder is TOKENIZER else CHAT_TOKENIZER
    engine = RecitingEngine(tokenizer, {prompt: [text] for prompt, text in answers.items()})
    return ask(file, engine, encoder, **{'context': 256, 'max_tokens': 24} | options), engine


def test_turns_of_a_chat_model(file):
    chat = ChatEncoder(CHAT_TOKENIZER, ChatTemplate(CHATML, name='chatml'))
    # A prompt is one turn of the user.
    found, engine = asked(file, {turn(question): text for question, text in SAID.items()}, chat)
    assert found.measure.name == 'questions/exact'
    assert found.measure.value == pytest.approx(2 / 3)
    assert [record['exact'] for record in found.records] == [True, True, False]
    assert found.records[0] == {
        'question': 'Who founded Duril?',
        'answer': 'It was founded by Miru.',
        'expected': 'It was founded by Miru.',
        'exact': True,
    }
    assert all(request.sampling.temperature == 0 for request in engine.requests)


def test_texts_of_a_base_model_and_limits(file, tmp_path):
    path = tmp_path / 'texts.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in LINES[1:]))
    found, engine = asked(str(path), SAID, TOKENIZER, context=10, limit=1)
    assert (found.measure.value, len(found.records)) == (1.0, 1)
    # The answer ends with the context.
    assert [request.max_tokens for request in engine.requests] == [10 - len('When?')]
    with pytest.raises(InputError, match='line 2 has 6 tokens, but the context length of the model is 6'):
        asked(str(path), SAID, TOKENIZER, context=6)
    with pytest.raises(InputError, match='no chat template'):
        asked(file, SAID, TOKENIZER)


def test_files_are_checked_before_a_model_is_loaded(file, tmp_path):
    check_questions(file)
    path = tmp_path / 'bad.jsonl'
    path.write_text(json.dumps(LINES[0]) + '\n' + json.dumps({'prompt': 'Who?'}) + '\n')
    with pytest.raises(InputError, match='line 2 has no "answer"'):
        check_questions(str(path))
    path.write_text('')
    with pytest.raises(InputError, match='no questions found'):
        check_questions(str(path))
    with pytest.raises(InputError, match='nowhere'):
        check_questions(str(tmp_path / 'nowhere.jsonl'))
