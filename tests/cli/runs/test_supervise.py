"""`maxlm supervise` on real commands: restarts, exit codes, signals and orphaned processes."""

import signal
import subprocess
import sys

import pytest

from maxlm.cli.runs.supervise import main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, exit_code
from tests.launch.programs import Programs
from tests.messages import assert_error_line

SUPERVISE = (sys.executable, '-m', 'maxlm.supervise')
ELASTIC = ('--min-hosts=1', '--hosts=2', '--devices-per-host=1')
TRAIN = ('python', '-m', 'maxlm.train', '--config=configs/tiny.py')


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path / 'stand_ins')


def in_this_process(programs, monkeypatch, capfd, *words):
    """Returns the exit code and the messages of `main`, which runs the fake programs."""
    for name, value in programs.environment.items():
        monkeypatch.setenv(name, value)
    return exit_code(main, list(words)), capfd.readouterr().err


def ends(*codes):
    return [{'code': code} for code in codes]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ('attempts', 'code', 'starts'),
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
def test_exit_codes_and_restarts(programs, tmp_path, monkeypatch, capfd, attempts, code, starts):
    programs.plan(attempts=attempts)
    words = ('--backoff', '0', '--', *TRAIN, f'--workdir={tmp_path}/run')
    ended, messages = in_this_process(programs, monkeypatch, capfd, *words)
    assert (ended, len(programs.lines('python'))) == (code, starts), messages
    assert (f'in a row without a new checkpoint in {tmp_path}/run/checkpoints\n' in messages) == (code not in (0, 2))


@pytest.mark.multiprocess
@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, 9)])
def test_a_signal_is_forwarded_once_and_ends_the_loop(programs, tmp_path, number, code):
    programs.plan(attempts=[{'seconds': 30, 'saving': 0.5, 'on_term': code}, {}, {}])
    process = programs.start(*SUPERVISE, '--', *TRAIN, f'--workdir={tmp_path}')
    programs.wait_for(1, ready=True)
    process.send_signal(number)
    programs.wait_for(1, signal='SIGTERM')
    process.send_signal(number)
    done = programs.finish(process)
    assert done.returncode == code
    assert f'stopped by {number.name}' in done.stderr
    assert len(programs.calls('python', signal='SIGTERM')) == 1
    assert programs.calls('python', signal='SIGINT') == []
    assert len(programs.lines('python')) == 1


@pytest.mark.multiprocess
def test_a_signal_during_the_pause_starts_nothing(programs, tmp_path):
    programs.plan(attempts=ends(1))
    process = programs.start(*SUPERVISE, '--backoff', '60', '--', *TRAIN, f'--workdir={tmp_path}')
    assert 'restarting in 60 s' in process.stderr.readline()
    process.terminate()
    assert programs.finish(process).returncode == EXIT_PREEMPTED
    assert len(programs.lines('python')) == 1


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != 'linux', reason='needs prctl, which only Linux has')
def test_orphans_are_reaped():
    # A subreaper adopts orphans, like process 1 of a container.
    subreaper = (
        'import ctypes, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); from maxlm.cli.runs.supervise import main; '
    )
    children = 'ps -o stat=,comm= --ppid $PPID'
    reaped = f'for _ in $(seq 50); do {children} | grep -q sleep || break; sleep 0.1; done'
    # The orphan runs until it is killed, so that a slow machine sees it too.
    orphan = 'orphan=$(sleep 300 > /dev/null 2>&1 & echo $!)'
    script = f'{orphan}; {children} | grep sleep; kill $orphan; {reaped}; echo later; {children}; exit 2'
    command = [sys.executable, '-c', f'{subreaper}sys.exit(main(sys.argv[1:]))', '--', 'sh', '-c', script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    before, _, after = done.stdout.partition('later')
    assert done.returncode == EXIT_BAD_INPUT
    assert 'sleep' in before
    assert 'sleep' not in after
    assert 'sh' in after


def test_dry_run(capsys):
    assert main(['--dry-run', '--', 'python', "it's", '--workdir=x']) == EXIT_DONE
    assert capsys.readouterr().out == """would run: python 'it'"'"'s' --workdir=x\n"""


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--max_failures=0', '--', 'true'], '--max-failures=0'),
        (['--max-failures'], '--max-failures'),
        (['--max-failure=3', '--', 'true'], '--max-failure=3'),
        (['--max-failures=few', '--', 'true'], '--max-failures'),
        (['--backoff=-1', '--', 'true'], '--backoff=-1'),
        (['--backoff=1'], 'no command'),
        (['--backoff=1', '--'], 'no command'),
        (['true'], 'true'),
        (['--min-hosts=1', '--', *TRAIN], '--hosts is missing'),
        (['--hosts=2', '--', *TRAIN], '--hosts: only for elastic runs'),
        ([*ELASTIC[:2], '--', *TRAIN], '--devices-per-host is missing'),
        (['--min-hosts=0', *ELASTIC[1:], '--', *TRAIN], '--min-hosts=0: must be at least 1'),
        (['--min-hosts=3', *ELASTIC[1:], '--', *TRAIN], '--min-hosts=3: must be at most --hosts=2'),
        ([*ELASTIC, '--host-timeout=0', '--', *TRAIN], '--host-timeout=0: must be above 0'),
        ([*ELASTIC, '--', *TRAIN, '--workdir=gs://bucket/run'], '--workdir=gs://bucket/run: the hosts exchange files'),
        ([*ELASTIC, '--', 'python', '--workdir=runs/x'], 'the command has no --config'),
        ([*ELASTIC, '--', *TRAIN, '--config.mesh.fsdp=2'], 'mesh fsdp=2 cannot use fewer hosts'),
        (['--', '/nowhere/python'], '/nowhere/python: cannot be started: No such file'),
    ],
)
def test_bad_options(capsys, options, words):
    assert exit_code(main, options) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, words)
