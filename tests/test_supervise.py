"""`maxlm.supervise` on real commands follows the same rules as launch/restart.sh, and hands signals on."""

import signal
import sys

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, exit_code
from maxlm.supervise import main
from tests.launch.programs import Programs

SUPERVISE = (sys.executable, '-m', 'maxlm.supervise')
TRAIN = ('python', '-m', 'maxlm.train', '--config=configs/tiny.py')


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path / 'stand_ins')


def in_this_process(programs, monkeypatch, capfd, *words):
    """Returns the exit code and the messages of `main`, whose commands are the stand-ins."""
    for name, value in programs.environment.items():
        monkeypatch.setenv(name, value)
    return exit_code(main, list(words)), capfd.readouterr().err


def ends(*codes):
    return [{'code': code} for code in codes]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ('lives', 'code', 'starts'),
    [
        (ends(1, 75, 2), EXIT_BAD_INPUT, 3),
        (ends(1, 1, 0), EXIT_DONE, 3),
        (ends(75, 1, 75, 0), 1, 3),
        (ends(1, 1, 7, 0), 7, 3),
        ([{'code': 75, 'step': step} for step in (9, 10, 11, 12)] + ends(1, 1, 0), EXIT_DONE, 7),
        ([{'code': 75, 'step': 9}] * 3 + ends(1, 0), 1, 4),
        ([{'signal': signal.SIGKILL}] * 3 + ends(0), 128 + signal.SIGKILL, 3),
    ],
)
@pytest.mark.parametrize('loop', ['python', 'shell'])
def test_the_same_rules_as_the_script(programs, tmp_path, monkeypatch, capfd, loop, lives, code, starts):
    programs.plan(lives=lives)
    words = ('--backoff', '0', '--', *TRAIN, f'--workdir={tmp_path}/run')
    if loop == 'python':
        ended, messages = in_this_process(programs, monkeypatch, capfd, *words)
    else:
        done = programs.run('launch/restart.sh', *words)
        ended, messages = done.returncode, done.stderr
    assert (ended, len(programs.lines('python'))) == (code, starts), messages


@pytest.mark.multiprocess
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once_and_ends_the_loop(programs, tmp_path, number):
    programs.plan(lives=[{'seconds': 30, 'saving': 0.5}, {}, {}])
    process = programs.start(*SUPERVISE, '--', *TRAIN, f'--workdir={tmp_path}')
    programs.wait_for(1, ready=True)
    process.send_signal(number)
    programs.wait_for(1, signal='SIGTERM')
    process.send_signal(number)
    done = programs.finish(process)
    assert done.returncode == EXIT_PREEMPTED
    assert f'told to stop by {number.name}' in done.stderr
    assert len(programs.calls('python', signal='SIGTERM')) == 1
    assert programs.calls('python', signal='SIGINT') == []
    assert len(programs.lines('python')) == 1


@pytest.mark.multiprocess
def test_a_signal_during_the_pause_starts_nothing(programs, tmp_path):
    programs.plan(lives=ends(1))
    process = programs.start(*SUPERVISE, '--backoff', '60', '--', *TRAIN, f'--workdir={tmp_path}')
    assert 'again in 60 s' in process.stderr.readline()
    process.terminate()
    assert programs.finish(process).returncode == EXIT_PREEMPTED
    assert len(programs.lines('python')) == 1


def test_dry_run(capsys):
    assert main(['--dry-run', '--', 'python', "it's", '--workdir=x']) == EXIT_DONE
    assert capsys.readouterr().out == """would run: python 'it'"'"'s' --workdir=x\n"""


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--max-failures=0', '--', 'true'], '--max-failures=0'),
        (['--max-failures=few', '--', 'true'], '--max-failures'),
        (['--backoff=-1', '--', 'true'], '--backoff=-1'),
        (['--backoff=1'], 'no command'),
        (['--backoff=1', '--'], 'no command'),
        (['true'], 'true'),
        (['--', '/nowhere/python'], '/nowhere/python: cannot be started: No such file'),
    ],
)
def test_bad_options(capsys, options, words):
    assert exit_code(main, options) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith('error: ')
    assert error.count('\n') == 1
    assert words in error
