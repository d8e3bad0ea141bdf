"""`maxlm chat` on a small model, with a pipe and on a terminal."""

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

import maxlm
from maxlm.cli.models import chat, generate
from maxlm.data.chat.template import CHATML
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.workdir.files import CHAT_TEMPLATE
from tests.conftest import ROOT
from tests.messages import assert_error_line
from tests.serving.fake_engine import chat_tokenizer
from tests.starting import make_start

LONG = 4000


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('chat')
    chat_tokenizer().save(folder / 'tokenizer.json')
    make_start(folder / 'run', folder / 'tokenizer.json', model__max_positions=LONG + 256, model__init_std=0.3)
    (folder / 'run' / CHAT_TEMPLATE).write_text(CHATML)
    return folder / 'run'


@pytest.fixture
def pipe(workdir, monkeypatch, capsys):
    """Returns a function that runs a command with piped lines: exit code, stdout, stderr."""

    def pipe(lines, *options, main=chat.main, checkpoint=None):
        monkeypatch.setattr('sys.stdin', io.StringIO(lines))
        code = exit_code(main, [*([] if main is generate.main else [str(checkpoint or workdir)]), *options])
        return code, *capsys.readouterr()

    return pipe


def test_a_pipe_gets_the_answers_of_the_api(pipe, workdir):
    options = ('--max-tokens=8', '--temperature=0', '--system=Be kind.')
    code, out, err = pipe('Hi\nAnd?\n/new\nHi\n/quit\nnever\n', *options)
    assert (code, err) == (EXIT_DONE, '')
    model = maxlm.load(workdir)
    system, user = {'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'Hi'}
    first = model.chat([system, user], max_tokens=8, temperature=0)
    conversation = [system, user, {'role': 'assistant', 'content': first}, {'role': 'user', 'content': 'And?'}]
    second = model.chat(conversation, max_tokens=8, temperature=0)
    assert out == f'{first}\n{second}\n{first}\n'
    # `generate` has the same conversations, without a system prompt.
    options = (f'--checkpoint={workdir}', '--chat', '--interactive', '--max-tokens=8', '--temperature=0')
    code, out, _ = pipe('Hi\n', *options, main=generate.main)
    assert (code, out) == (EXIT_DONE, model.chat([user], max_tokens=8, temperature=0) + '\n')


@pytest.mark.parametrize(
    ('lines', 'options', 'words'),
    [
        ('x' * 5000, (), 'the prompt has 5'),
        ('Hi', ('--max-tokens=-1',), '--max-tokens=-1: must be at least 0'),
        ('Hi', ('--seed=4294967296',), '--seed=4294967296: must be from 0 to 4294967295'),
        ('/tools', (), 'unknown command /tools'),
    ],
)
def test_errors_in_a_pipe_end_the_command(pipe, lines, options, words):
    code, out, err = pipe(f'{lines}\n', *options)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert_error_line(err, words)


def test_a_model_without_a_chat_template(pipe, tmp_path):
    chat_tokenizer().save(tmp_path / 'tokenizer.json')
    make_start(tmp_path / 'run', tmp_path / 'tokenizer.json')
    code, out, err = pipe('', checkpoint=tmp_path / 'run')
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert 'use a model trained on conversations' in err


class Conversation:
    """The command on a terminal."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        command = [sys.executable, '-m', 'maxlm', 'chat', *arguments]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'TERM': 'dumb', 'PYTHONFAULTHANDLER': '1'}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.text = ''

    def until(self, condition, seconds=100.0):
        """Reads the output until a condition is true. The timeout only ends a failing test."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text
            if select.select([self._master], [], [], 0.05)[0]:
                self.text += os.read(self._master, 65536).decode(errors='replace').replace('\r', '')

    def type(self, text):
        """Types a line, and forgets the former output."""
        self.text = ''
        os.write(self._master, text.encode() + b'\n')

    def interrupt_prompt(self):
        """Interrupts until the next prompt. `input` overlooks a signal just before it waits for a key."""
        self.text = ''
        for _ in range(50):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                return self.until(lambda: self.text.endswith('\n> '), seconds=2)
        raise AssertionError(self.text)

    def exit_code(self, seconds=100.0):
        """Waits for the end of the process. A process that hangs prints where before it is aborted."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(OSError):  # The terminal closes with the process.
            self.until(lambda: False, seconds=10)
        raise AssertionError(self.text)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.multiprocess
def test_an_interrupt_on_a_terminal_stops_the_answer(workdir):
    conversation = Conversation(str(workdir), '--temperature=0', f'--max-tokens={LONG}')
    try:
        conversation.until(lambda: conversation.text.endswith('\n> '))
        assert '/new starts a new conversation' in conversation.text
        # At the prompt, an interrupt only begins a new line.
        conversation.interrupt_prompt()
        conversation.type('Hi')
        conversation.until(lambda: len(conversation.text) > len('Hi\n') + 20)
        conversation.process.send_signal(signal.SIGINT)
        conversation.until(lambda: conversation.text.endswith('\n> '))
        assert len(conversation.text) < LONG // 2
        conversation.type('/quit')
        assert conversation.exit_code() == EXIT_DONE
    finally:
        conversation.close()
