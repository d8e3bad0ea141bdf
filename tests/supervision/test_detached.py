"""Detached supervisors: they survive the terminal, report early failures, exclude each other, and can be stopped."""

import os
import signal
import subprocess
import sys

import pytest

from maxlm.cli.runs.supervise import main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.supervision import detached
from maxlm.workdir.run_storage import cache_directory
from tests.conftest import ROOT
from tests.messages import assert_error_line

pytestmark = pytest.mark.multiprocess
# Locks its workdir like training, and exits half a second after SIGTERM.
TRAINING = """
import os, pathlib, signal, sys, time

workdir = pathlib.Path(sys.argv[1].removeprefix('--workdir='))

def save(number, frame):
    time.sleep(0.5)
    (workdir / 'saved').touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
print('session', os.getsid(0), os.isatty(0), flush=True)
(workdir / 'run.lock').write_text(str(os.getpid()))
time.sleep(100)
"""


def start(workdir, *options, program=TRAINING):
    command = [sys.executable, '-m', 'maxlm.supervise', '--detach', *options, '--', sys.executable, '-S', '-c', program]
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    # Waits until the pipes are closed, which a detached process must not keep open.
    return subprocess.run(
        [*command, f'--workdir={workdir}'], env=environment, capture_output=True, text=True, timeout=60
    )


def pid_of(workdir):
    return int(detached.detached_files(str(workdir)).pid.read_text())


@pytest.fixture
def running(tmp_path):
    workdir = tmp_path / 'run'
    done = start(workdir)
    yield workdir, done
    if workdir.exists() and not (workdir / 'saved').exists():
        os.killpg(pid_of(workdir), signal.SIGKILL)


def test_start_and_stop(running, capsys):
    workdir, done = running
    assert done.returncode == EXIT_DONE, done.stderr
    pid, log = pid_of(workdir), detached.detached_files(str(workdir)).log
    assert done.stdout == (
        f'started: process {pid}, which continues without this terminal\n'
        f'watch:  maxlm monitor {workdir}\n'
        f'output: tail -f {log}\n'
        f'stop:   maxlm supervise --stop {workdir}\n'
    )
    assert log.read_text() == f'session {pid} False\n'
    # A second start changes nothing.
    again = start(workdir)
    assert (again.returncode, again.stderr.count('\n')) == (EXIT_BAD_INPUT, 1)
    assert f'the detached process {pid} is using it' in again.stderr
    assert pid_of(workdir) == pid
    assert exit_code(main, [f'--stop={workdir}']) == EXIT_DONE
    assert (workdir / 'saved').exists()
    assert f'stopping process {pid}, which saves first\n' in capsys.readouterr().out
    assert 'supervise: stopped by SIGTERM; the command ended with exit code 75' in log.read_text()
    # Negative control: a stopped run cannot be stopped.
    assert exit_code(main, [f'--stop={workdir}']) == EXIT_BAD_INPUT
    assert 'no detached run is running on this host' in capsys.readouterr().err
    # A later run appends its output.
    (workdir / 'saved').unlink()
    assert start(workdir).returncode == EXIT_DONE
    assert log.read_text().count('session') == 2


@pytest.mark.parametrize('existed', [False, True])
def test_early_failures_are_reported(tmp_path, existed):
    workdir = tmp_path / 'run'
    if existed:
        workdir.mkdir()
        (workdir / 'run.lock').write_text('{"of": "an earlier run"}')
    done = start(workdir, program="print('error: model.dim=-1: must be positive'); raise SystemExit(2)")
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr.splitlines() == [
        'error: model.dim=-1: must be positive',
        'supervise: bad input (exit code 2): not restarted',
    ]
    assert done.stdout == ''
    assert workdir.exists() == existed


def test_repeated_failures_are_reported(tmp_path):
    done = start(tmp_path, '--backoff=0', '--max-failures=2', program='raise SystemExit(7)')
    assert done.returncode == 7
    assert 'giving up after 2 failures' in done.stderr


def test_slow_starts(tmp_path):
    program = (
        'import sys; from maxlm.supervision import detached; from maxlm.cli.runs.supervise import main; '
        'detached.START_SECONDS = 0.5; sys.exit(main(sys.argv[1:]))'
    )
    words = ['--detach', '--', 'sh', '-c', 'sleep 2', f'--workdir={tmp_path}']
    done = subprocess.run([sys.executable, '-c', program, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_DONE
    assert done.stdout.startswith('still starting after 0.5 s: process')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--detach', '--', 'true'], '--detach needs --workdir in the command'),
        (['--detach', '--', 'true', '--workdir=/proc/run'], 'choose a writable --workdir'),
        (['--stop=nowhere'], 'give --stop the workdir of a run that --detach started'),
        (['--stop=nowhere', '--', 'true'], '--stop takes no command'),
        (['--stop'], '--stop'),
    ],
)
def test_bad_options(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert exit_code(main, words) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('text', ['', '-1', '0', '1', 'x', '4\n5'])
def test_a_damaged_process_id_ends_no_process(running, capsys, text):
    workdir, _ = running
    path = detached.detached_files(str(workdir)).pid
    pid = pid_of(workdir)
    path.write_text(text)
    assert exit_code(main, [f'--stop={workdir}']) == EXIT_BAD_INPUT
    assert 'not a process ID' in capsys.readouterr().err
    path.write_text(str(pid))
    assert exit_code(main, [f'--stop={workdir}']) == EXIT_DONE


def test_a_workdir_that_looks_like_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = start('-run')
    assert 'stop:   maxlm supervise --stop ./-run\n' in done.stdout
    assert 'watch:  maxlm monitor ./-run\n' in done.stdout
    assert exit_code(main, ['--stop', './-run']) == EXIT_DONE


def test_a_full_disk_is_one_line(tmp_path):
    words = ['--detach', '--', 'true', f'--workdir={tmp_path / "run"}']
    done = subprocess.run(
        ['sh', '-c', 'ulimit -f 0; exec "$@"', 'sh', sys.executable, '-m', 'maxlm.supervise', *words],
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr.count('\n') == 1
    assert done.stderr.endswith('.pid: File too large; choose another --workdir\n')
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_stop_is_reported(running, monkeypatch, capsys):
    workdir, _ = running
    monkeypatch.setattr(detached, 'STOP_SECONDS', 0.05)
    pid = pid_of(workdir)
    assert exit_code(main, [f'--stop={workdir}']) == EXIT_DONE
    assert capsys.readouterr().out.count(f'kill -KILL -- -{pid} ends it without a save\n') == 1


def test_a_workdir_in_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A file system of fsspec that needs no network.
    url, cache = 'memory://bucket/run', tmp_path / 'cache'
    local = cache_directory(url, str(cache))
    local.mkdir(parents=True)
    program = TRAINING.replace("sys.argv[1].removeprefix('--workdir=')", repr(str(local)))
    command = [sys.executable, '-S', '-c', program, f'--config.data.cache_dir={cache}', f'--workdir={url}']
    done = subprocess.run(
        [sys.executable, '-m', 'maxlm.supervise', '--detach', '--', *command],
        env=os.environ | {'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith('started: process')
    assert exit_code(main, [f'--stop={url}']) == EXIT_DONE
    assert (local / 'saved').exists()


def test_files_of_a_workdir_in_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {detached.detached_files(url).log for url in ('gs://a/run', 'gs://b/run', 's3://a/run')}
    assert len(names) == 3
    assert {name.parent for name in names} == {tmp_path / 'logs'}
