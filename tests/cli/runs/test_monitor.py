"""`maxlm monitor`: prints a run once, or displays it on a terminal, which it restores."""

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from maxlm.cli.runs import monitor
from maxlm.errors import EXIT_BAD_INPUT, InputError, exit_code
from tests import workdirs
from tests.conftest import ROOT
from tests.workdirs import BUILDERS

DEADLINE = 60.0
ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = '\x1b[?1049h', '\x1b[?1049l', '\x1b[?25h'
STYLE = re.compile(r'\x1b\[[\d;]*m')


@pytest.mark.parametrize('name', BUILDERS)
@pytest.mark.parametrize('columns', ['80', '200', '30'])
def test_every_workdir_is_printed_as_plain_text(name, columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', columns)
    workdir = BUILDERS[name](tmp_path / name, time.time())
    assert monitor.main([str(workdir), '--once']) == 0
    out, err = capsys.readouterr()
    assert err == ''
    assert out.startswith(name)
    assert '\x1b' not in out
    assert max(map(len, out.splitlines())) <= int(columns)


def test_without_a_terminal_it_prints_once(tmp_path, capsys):
    workdirs.finished(tmp_path)
    assert monitor.main([str(tmp_path)]) == 0
    assert 'all steps are done' in capsys.readouterr().out


def test_several_runs(tmp_path, capsys):
    names = [str(workdirs.finished(tmp_path / 'a')), str(workdirs.crashed(tmp_path / 'b'))]
    assert monitor.main([*names, '--once']) == 0
    out = capsys.readouterr().out
    assert out.index('validation') < out.index('a  ● finished') < out.index('b  ● crashed')


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['nowhere'], r'nowhere: No such file or directory; give a workdir of maxlm train'),
        ([], 'required: WORKDIR'),
        (['.', '--interval=0'], r'--interval=0: must be from 0\.1 to 86400'),
        (['.', '--interval=nan'], r'--interval=nan: must be from 0\.1'),
        (['.', '--interval=x'], '--interval'),
        (['--one', '.'], 'unrecognized arguments: --one'),
    ],
)
def test_bad_input(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        monitor.main(argv)


def test_a_directory_that_is_no_workdir_is_bad_input(tmp_path, capsys):
    (tmp_path / 'x').write_text('')
    assert exit_code(monitor.main, [str(tmp_path)]) == EXIT_BAD_INPUT
    assert capsys.readouterr() == (
        '',
        f'error: {tmp_path}: not a workdir of maxlm train: it contains no config.json; give the workdir of a run\n',
    )


@pytest.mark.multiprocess
def test_it_starts_without_jax_and_without_tensorflow(tmp_path):
    workdirs.running(tmp_path)
    program = (
        'import sys; from maxlm.cli.runs import monitor; monitor.main(sys.argv[1:]);'
        "print(*(name for name in ('jax', 'tensorflow', 'numpy', 'fsspec', 'rich') if name in sys.modules))"
    )
    command = [sys.executable, '-c', program, str(tmp_path), '--once']
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == 'rich'


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, *arguments, columns=80, lines=24, **environment):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (lines, columns))
        self.before = termios.tcgetattr(self.slave)
        self.text = self.raw = ''
        self._decoder = codecs.getincrementaldecoder('utf-8')()
        # These variables would override the size of the terminal.
        kept = {name: value for name, value in os.environ.items() if name not in ('COLUMNS', 'LINES')}
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'maxlm.monitor', *arguments],
            cwd=ROOT,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**kept, 'TERM': 'xterm-256color', **environment},
        )

    def wait_for(self, words, *, since=0):
        """Reads until the output contains the words."""
        end = time.monotonic() + DEADLINE
        while words not in self.text[since:]:
            assert time.monotonic() < end, self.text[-3000:]
            ready, _, _ = select.select([self.master], [], [], 0.2)
            if ready:
                self.raw += self._decoder.decode(os.read(self.master, 65536))
                self.text = STYLE.sub('', self.raw)

    def finish(self):
        """Reads the remaining output and returns the exit code."""
        self.wait_for(SHOW_CURSOR)
        code = self.process.wait(DEADLINE)
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def press(text):
    return lambda terminal: os.write(terminal.master, text.encode())


ENDS = {
    'q': press('q'),
    'SIGINT': lambda terminal: terminal.process.send_signal(signal.SIGINT),
    'SIGTERM': lambda terminal: terminal.process.send_signal(signal.SIGTERM),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize('how', ENDS)
def test_the_terminal_is_restored(how, tmp_path):
    workdirs.running(tmp_path, time.time())
    with Terminal(str(tmp_path)) as terminal:
        terminal.wait_for('q quit')
        assert termios.tcgetattr(terminal.slave) != terminal.before
        ENDS[how](terminal)
        assert terminal.finish() == 0
    assert 'Traceback' not in terminal.text
    assert terminal.text.index(ENTER_SCREEN) < terminal.text.index('step 234 of 400')
    assert terminal.text.index('step 234 of 400') < terminal.text.rindex(LEAVE_SCREEN)


@pytest.mark.multiprocess
def test_it_follows_the_run_and_the_size_of_the_terminal(tmp_path):
    workdirs.running(tmp_path, time.time())
    with Terminal(str(tmp_path), '--interval=0.1') as terminal:
        terminal.wait_for('validation 2.5443')
        line = f'{{"time": {time.time()}, "step": 300, "eval/loss": 1.2345}}\n'
        with (tmp_path / 'metrics.jsonl').open('a') as file:
            file.write(line)
        terminal.wait_for('validation 1.2345 at step 300')
        assert 'learning rate' not in terminal.text
        termios.tcsetwinsize(terminal.slave, (60, 200))
        terminal.wait_for('learning rate')
        # The monitor continues if the workdir disappears temporarily.
        seen = len(terminal.text)
        tmp_path.rename(tmp_path.with_name('away'))
        terminal.wait_for('cannot be read', since=seen)
        tmp_path.with_name('away').rename(tmp_path)
        press('q')(terminal)
        assert terminal.finish() == 0


@pytest.mark.multiprocess
def test_keys_select_the_run(tmp_path):
    names = [str(workdirs.finished(tmp_path / 'a')), str(workdirs.crashed(tmp_path / 'b'))]
    with Terminal(*names) as terminal:
        terminal.wait_for('all steps are done')
        assert 'RESOURCE_EXHAUSTED' not in terminal.text
        press('\t')(terminal)
        terminal.wait_for('RESOURCE_EXHAUSTED')
        seen = len(terminal.text)
        press('1')(terminal)
        terminal.wait_for('all steps are done', since=seen)
        press('q')(terminal)
        assert terminal.finish() == 0


@pytest.mark.multiprocess
def test_no_color(tmp_path):
    """NO_COLOR disables colors with any value; see https://no-color.org."""
    workdirs.crashed(tmp_path)
    colored = re.compile(r'\x1b\[[\d;]*3[0-7]m')
    for environment, found in (({}, True), ({'NO_COLOR': '1'}, False)):
        with Terminal(str(tmp_path), **environment) as terminal:
            terminal.wait_for('q quit')
            press('q')(terminal)
            terminal.finish()
        assert bool(colored.search(terminal.raw)) == found
