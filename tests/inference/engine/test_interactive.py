"""Tests the interactive sessions with fake input and output."""

import io
import signal

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.interactive import CHAT_HELP, HELP, ChatSession, Terminal, continue_lines
from maxlm.inference.engine.requests import Request
from maxlm.inference.sampling import Sampling
from tests.inference.engines import load

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
# Interrupts the session while it reads a line.
INTERRUPT = object()


@pytest.fixture(scope='module')
def model():
    tokenizer = bytes_tokenizer().with_special_tokens(['<|system|>', '<|user|>', '<|assistant|>', '<|end|>'])
    chat = ChatEncoder(tokenizer, ChatTemplate(TEMPLATE, name='template'))
    return load('gpt2')._replace(tokenizer=tokenizer, chat=chat)


@pytest.fixture(scope='module')
def engine(model):
    return Engine(model, num_slots=1)


class Session:
    """Runs a session with the given lines, and keeps its prompts, responses and notes."""

    def __init__(self, model, engine, *lines, chat, max_tokens=5, is_interactive=True, **settings):
        self.prompts, self._lines = [], iter(lines)
        self._model, self._max_tokens = model, max_tokens
        output, notes = io.StringIO(), io.StringIO()
        terminal = Terminal(self._read, output, notes, is_interactive)
        self._prompt_text = '> ' if is_interactive else ''
        try:
            if chat:
                ChatSession(model, engine, self._request, terminal, max_tokens=max_tokens, **settings).run()
            else:
                continue_lines(engine, lambda text: self._request(list(text.encode())), terminal)
        finally:
            self.responses, self.notes = output.getvalue(), notes.getvalue()

    def _read(self, prompt_text):
        assert prompt_text == self._prompt_text
        line = next(self._lines, None)
        if line is INTERRUPT:
            raise KeyboardInterrupt
        if line is None:
            raise EOFError
        return line

    def _request(self, ids):
        self.prompts.append(self._model.tokenizer.decode(ids))
        return Request(tuple(ids), self._max_tokens, Sampling(temperature=0))


def test_a_conversation_is_remembered(model, engine):
    session = Session(model, engine, 'Hi', '  ', INTERRUPT, 'And?', '/new', 'Hi', chat=True)
    prompts = session.prompts
    assert prompts[0] == prompts[2] == '<|user|>Hi<|assistant|>'
    answer = prompts[1].removeprefix('<|user|>Hi<|assistant|>').removesuffix('<|end|><|user|>And?<|assistant|>')
    assert len(answer) < len(prompts[1]) - 40
    assert session.responses.startswith(f'{answer}\n')
    # Ctrl-C at the prompt and the end of the input each begin a new line.
    assert session.notes == f'{CHAT_HELP}\n\n\n'


def test_the_system_prompt_can_be_changed(model, engine):
    lines = ('Hi', '/system Be kind.', '/new', 'Hi', '/system', '/new', 'Hi', '/exit', '/quit', 'never')
    session = Session(model, engine, *lines, chat=True, system='Be brief.')
    assert session.prompts == [
        '<|system|>Be brief.<|user|>Hi<|assistant|>',
        '<|system|>Be kind.<|user|>Hi<|assistant|>',
        '<|user|>Hi<|assistant|>',
    ]
    assert session.notes == f'{CHAT_HELP}\nunknown command /exit; use /new, /system or /quit\n'


def test_the_oldest_turns_are_dropped(model, engine):
    """The context has 100 tokens, of which 5 are kept free for the answer."""
    session = Session(model, engine, 'a' * 30, 'b' * 30, 'c' * 30, 'd' * 100, chat=True, system='S')
    assert session.prompts[1].startswith(f'<|system|>S<|user|>{"a" * 30}<|assistant|>')
    assert session.prompts[2].startswith(f'<|system|>S<|user|>{"b" * 30}<|assistant|>')
    note = '(The context of 100 tokens is full. The model no longer sees the oldest 2 messages.)'
    # The last message stays, so that the error is about it.
    assert session.prompts[3] == f'<|system|>S<|user|>{"d" * 100}<|assistant|>'
    _, dropped, error = session.notes.splitlines()[:3]
    assert dropped == note
    assert error == 'max_tokens=5: the prompt has 104 tokens and the context length is 100; shorten the prompt'


def test_a_pipe_receives_only_answers(model, engine):
    session = Session(model, engine, 'Hi', '/new', 'Hi', chat=True, is_interactive=False)
    first, second, rest = session.responses.split('\n')
    assert (first, rest, session.notes) == (second, '', '')
    with pytest.raises(InputError, match='max_tokens=5: the prompt has'):
        Session(model, engine, 'x' * 200, chat=True, is_interactive=False)
    with pytest.raises(InputError, match='byte 2 of a line is not UTF-8'):
        Session(model, engine, 'ab\udcff', chat=True, is_interactive=False)


def test_a_model_without_a_template_is_reported_first(model, engine):
    with pytest.raises(InputError, match='use a model trained on conversations'):
        Session(model._replace(chat=None), engine, chat=True)


def test_texts_are_independent(model, engine):
    session = Session(model, engine, 'abc', 'abc', '/quit', 'never', chat=False)
    assert session.prompts == ['abc', 'abc']
    assert session.notes == f'{HELP}\n'


def test_refused_prompts_are_reported(model, engine):
    session = Session(model, engine, 'x' * 200, 'ok', chat=False)
    assert 'max_tokens=5: the prompt has 200 tokens' in session.notes
    assert session.prompts == ['x' * 200, 'ok']


def test_an_answer_can_be_stopped(model, engine, monkeypatch):
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, 'step', interrupted)
    handler = signal.getsignal(signal.SIGINT)
    session = Session(model, engine, 'abc', 'abc', chat=False, max_tokens=90)
    # The next line is answered completely.
    stopped, complete = session.responses.split('\n')[:2]
    assert complete.startswith(stopped)
    assert len(stopped) < len(complete)
    assert engine.state.running == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_interrupt_ends_the_program(model, engine, monkeypatch):
    def stuck():
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr(engine, 'step', stuck)
    with pytest.raises(KeyboardInterrupt):
        Session(model, engine, 'abc', chat=False)
    monkeypatch.undo()
    while engine.step():
        pass
