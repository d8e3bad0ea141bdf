"""Tests the interactive terminal with fake input and output."""

import io
import signal

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.interactive import HELP, run_interactive
from maxlm.inference.engine.requests import Request
from maxlm.inference.sampling import Sampling
from tests.inference.engines import load

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)


@pytest.fixture(scope='module')
def model():
    tokenizer = bytes_tokenizer().with_special_tokens(['<|user|>', '<|assistant|>', '<|end|>'])
    chat = ChatEncoder(tokenizer, ChatTemplate(TEMPLATE, name='template'))
    return load('gpt2')._replace(tokenizer=tokenizer, chat=chat)


@pytest.fixture(scope='module')
def engine(model):
    return Engine(model, num_slots=1)


def interact(model, engine, *lines, chat, max_tokens=5):
    """Returns the output text and the prompts that the engine received."""
    prompts, given, output = [], iter(lines), io.StringIO()

    def read(prompt_text):
        assert prompt_text == '> '
        line = next(given, None)
        if line is None:
            raise EOFError
        return line

    def request(ids):
        prompts.append(model.tokenizer.decode(ids))
        return Request(tuple(ids), max_tokens, Sampling(temperature=0))

    run_interactive(model, engine, request, chat=chat, read_line=read, output=output)
    head, _, answers = output.getvalue().partition('\n')
    assert head == HELP
    return answers, prompts


def test_a_conversation_is_remembered(model, engine):
    answers, prompts = interact(model, engine, 'Hi', '  ', 'And?', '/new', 'Hi', chat=True)
    assert prompts[0] == prompts[2] == '<|user|>Hi<|assistant|>'
    first = answers[: answers.index('\n')] if answers.count('\n') == 4 else None
    assert prompts[1].startswith('<|user|>Hi<|assistant|>')
    assert prompts[1].endswith('<|end|><|user|>And?<|assistant|>')
    if first is not None:
        assert first in prompts[1]


def test_texts_are_independent(model, engine):
    _, prompts = interact(model, engine, 'abc', 'abc', '/quit', 'never', chat=False)
    assert prompts == ['abc', 'abc']


def test_refused_prompts_are_reported(model, engine):
    answers, prompts = interact(model, engine, 'x' * 200, 'ok', chat=False)
    assert 'max_tokens=5: the prompt has 200 tokens' in answers
    assert prompts == ['x' * 200, 'ok']


def test_an_answer_can_be_stopped(model, engine, monkeypatch):
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, 'step', interrupted)
    interact(model, engine, 'abc', chat=False, max_tokens=90)
    assert len(calls) < 15
    assert engine.state.running == 0
