"""A closed terminal in the middle of a command: it saves its state and exits with 75, and no step is lost."""

import signal
import subprocess
import sys

import pytest

from maxlm.checkpoint.manager import saved_steps
from maxlm.cli.setup.prepare import main as prepare
from maxlm.errors import EXIT_BROKEN_PIPE, EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.telemetry.events import read_events
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import CONSTANT, arguments, curve, run
from tests.conftest import ROOT
from tests.killing import stage, write_corpus
from tests.lost_terminal import on_terminal
from tests.preparing import contents

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures('shared_steps')]
SETTINGS = {'eval__interval': 0, 'train__num_steps': 20, **CONSTANT}
# Records its signals in the file `signals`, and ends half a second after the first one, like a run that saves.
COMMAND = """
import pathlib, signal, time

received = []
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, frame: received.append(number))
with open('starts', 'a') as file:
    print('started', file=file)
while not received:
    time.sleep(0.02)
time.sleep(0.5)
pathlib.Path('signals').write_text(' '.join(signal.Signals(number).name for number in received))
raise SystemExit(75)
"""


def last_step(workdir):
    return max((line['step'] for line in read_metrics(workdir)), default=0) if workdir.exists() else 0


def test_training_saves(dataset, tmp_path):
    workdir = tmp_path / 'run'
    with on_terminal(tmp_path, 'train', arguments(dataset, workdir, **SETTINGS)) as terminal:
        terminal.wait_for(lambda: last_step(workdir) >= 3)
        assert terminal.close() == EXIT_PREEMPTED
    step = last_step(workdir)
    assert step < 20
    assert max(saved_steps(workdir)) == step
    message = read_events(workdir).lines[-1]['message']
    assert message == f'SIGHUP (the terminal was closed): saved step {step} of 20; start again to resume'
    assert run(dataset, workdir, **SETTINGS) == EXIT_DONE
    assert run(dataset, tmp_path / 'uninterrupted', **SETTINGS) == EXIT_DONE
    assert curve(workdir) == curve(tmp_path / 'uninterrupted')


def test_training_under_nohup_continues_without_output(dataset, tmp_path):
    workdir = tmp_path / 'run'
    words = arguments(dataset, workdir, **(SETTINGS | {'train__num_steps': 8}))
    with on_terminal(tmp_path, 'train', words, ignored=True) as terminal:
        terminal.wait_for(lambda: last_step(workdir) >= 2)
        assert terminal.close() == EXIT_DONE
    assert last_step(workdir) == 8
    assert 'step       8' in (workdir / 'run.log').read_text()


def test_preparation_resumes(tmp_path):
    texts, output = tmp_path / 'texts', tmp_path / 'data'
    write_corpus(texts, 1)
    words = ['--input', str(texts), '--tokenizer', 'bpe:400', '--deduplicate', 'near', '--workers', '2', '--output']
    with on_terminal(tmp_path, 'prepare', [*words, output]) as terminal:
        terminal.wait_for(lambda: stage(output) not in ('start', 'finished'))
        assert terminal.close() == EXIT_PREEMPTED
    assert stage(output) != 'finished'
    assert exit_code(prepare, [*words, str(output)]) == EXIT_DONE
    words[words.index('2')] = '1'
    assert exit_code(prepare, [*words, str(tmp_path / 'uninterrupted')]) == EXIT_DONE
    assert contents(output) == contents(tmp_path / 'uninterrupted')


def test_a_supervised_command_saves_once_and_is_not_restarted(tmp_path):
    script = f'import os; os.chdir({str(tmp_path)!r})\n{COMMAND}'
    with on_terminal(tmp_path, 'supervise', ['--', sys.executable, '-S', '-c', script]) as terminal:
        terminal.wait_for((tmp_path / 'starts').exists)
        assert terminal.close() == EXIT_PREEMPTED
    assert (tmp_path / 'starts').read_text() == 'started\n'
    # The terminal sends SIGHUP to both, and the supervisor forwards it as SIGTERM. All come during the save.
    received = (tmp_path / 'signals').read_text().split()
    assert sorted(set(received)) == ['SIGHUP', 'SIGTERM']
    assert received.count('SIGTERM') == 1


# Prints until it is stopped.
PRINTING = """
import sys, time
from maxlm.cli.process import run_command

def main(argv):
    while True:
        print('line', flush=True)
        print('progress', file=sys.stderr)
        time.sleep(0.02)

sys.exit(run_command(main, output_is_optional={optional}))
"""


@pytest.mark.parametrize(('optional', 'code'), [(True, EXIT_PREEMPTED), (False, EXIT_BROKEN_PIPE)])
def test_a_reader_that_exits_does_not_end_a_run(optional, code):
    program = PRINTING.format(optional=optional)
    process = subprocess.Popen(
        [sys.executable, '-c', program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'line\n'
    process.stdout.close()
    for _ in range(20):
        assert process.stderr.readline() in ('progress\n', '')
    process.terminate()
    process.stderr.close()
    assert process.wait(60) == code


@pytest.mark.parametrize(
    ('number', 'ignored', 'code'),
    [
        (signal.SIGHUP, False, EXIT_PREEMPTED),
        (signal.SIGTERM, True, EXIT_PREEMPTED),
        (signal.SIGHUP, True, EXIT_DONE),
    ],
)
def test_signals_of_other_commands(number, ignored, code):
    signals = 'import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n' if ignored else ''
    program = signals + PRINTING.format(optional=False).replace('while True', 'for _ in range(100)')
    process = subprocess.Popen(
        [sys.executable, '-c', program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'line\n'
    process.send_signal(number)
    assert process.wait(60) == code
    last = process.stderr.read().splitlines()[-1]
    assert last == 'progress' if code == EXIT_DONE else last.endswith('stopped; run the same command again to continue')


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&- >&- 2>&-'])
def test_commands_without_output_descriptors(tmp_path, closed):
    # A file that the command opens must not receive its output.
    command = (
        'from maxlm.cli.process import run_command; run_command(lambda argv: print(open("file", "w").fileno() > 2))'
    )
    done = subprocess.run(
        ['sh', '-c', f'"$0" -c "$1" {closed}; echo $? >code', sys.executable, command],
        cwd=tmp_path,
        env={'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ''
    assert done.stdout in ('', 'True\n')
    assert (tmp_path / 'code').read_text() == f'{EXIT_DONE}\n'
    assert (tmp_path / 'file').read_text() == ''
