"""Tests the workdir lock: one holder at a time, takeover by exactly one process, and detection of a lost lock."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxlm.errors import EXIT_BAD_INPUT, InputError
from maxlm.workdir import lock
from maxlm.workdir.lock import LOCK, WorkdirLock, is_alive, this_process
from tests.conftest import ROOT
from tests.faults import how_many, measured

QUICK = {'heartbeat_seconds': 0.1, 'stale_seconds': 1.0}
# Takes the lock of a directory, prints a line, and holds the lock until its input ends.
HOLDER = """
import sys
from pathlib import Path
from maxlm.errors import exit_code
from maxlm.workdir.lock import WorkdirLock

def hold(arguments):
    with WorkdirLock(Path(arguments[0]), heartbeat_seconds=0.1, stale_seconds=1.0):
        print('held', flush=True)
        sys.stdin.read()

sys.exit(exit_code(hold, sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    # A Console of another test may have disabled propagation.
    monkeypatch.setattr(logging.getLogger('maxlm'), 'propagate', True)
    return caplog


def start(workdir):
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    return subprocess.Popen([sys.executable, '-c', HOLDER, str(workdir)], cwd=ROOT, text=True, **pipes)


def plant(workdir, **facts):
    """Writes a lock of this process with changed fields."""
    owner = dataclasses.replace(this_process(), token='planted', **facts)
    (workdir / LOCK).write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


def names(workdir):
    return sorted(entry.name for entry in workdir.iterdir())


def test_second_run_is_refused_and_the_holder_is_named(tmp_path, record_property):
    attempts = how_many(2, 20)
    first = start(tmp_path)
    assert first.stdout.readline() == 'held\n'
    for _ in range(attempts):
        _, err = (second := start(tmp_path)).communicate(timeout=60)
        assert second.returncode == EXIT_BAD_INPUT
        assert err.startswith(f'error: --workdir={tmp_path}: in use by process {first.pid} of ')
        assert err.count('\n') == 1
    assert names(tmp_path) == [LOCK]
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert names(tmp_path) == []
    # Control: the lock is free now.
    again = start(tmp_path)
    assert again.stdout.readline() == 'held\n'
    again.communicate(timeout=60)
    measured(record_property, 'two-runs', f'{attempts} of {attempts} refused, exit code 2')


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_lock_of_a_killed_process_is_free_but_not_of_a_stopped_process(tmp_path, log, number):
    holder = start(tmp_path)
    assert holder.stdout.readline() == 'held\n'
    holder.send_signal(number)
    try:
        if number == signal.SIGSTOP:
            # Longer than the heartbeat timeout. The process is on this machine, so it is checked directly.
            time.sleep(1.5 * QUICK['stale_seconds'])
            with pytest.raises(InputError, match=f'in use by process {holder.pid} '), WorkdirLock(tmp_path, **QUICK):
                pass
        else:
            # The process stays a zombie, as if its parent were busy.
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
            with WorkdirLock(tmp_path, **QUICK):
                assert f'taken over from process {holder.pid} of' in log.text
                assert names(tmp_path) == [LOCK]
    finally:
        holder.kill()
        holder.communicate()


def test_one_of_several_processes_takes_over(tmp_path):
    plant(tmp_path, pid=2**22 + 1, born='1')
    processes = [start(tmp_path) for _ in range(6)]
    try:
        lines = [process.stdout.readline() for process in processes]
        assert sorted(lines) == [''] * 5 + ['held\n']
        codes = [process.wait(60) for process, line in zip(processes, lines, strict=True) if not line]
        assert codes == [EXIT_BAD_INPUT] * 5
        (winner,) = (process for process, line in zip(processes, lines, strict=True) if line)
        assert json.loads((tmp_path / LOCK).read_text())['pid'] == winner.pid
    finally:
        for process in processes:
            process.communicate()
    assert names(tmp_path) == []


def test_lock_with_heartbeats_of_another_machine_is_respected(tmp_path):
    plant(tmp_path, host='elsewhere', kernel='another')
    ended = threading.Event()

    def beat():
        while not ended.wait(0.1):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(InputError, match=r'in use by process .* on elsewhere'), WorkdirLock(tmp_path, **QUICK):
        pass
    ended.set()
    thread.join()
    assert json.loads((tmp_path / LOCK).read_text())['token'] == 'planted'
    # Control: the lock is free once heartbeats stop.
    with WorkdirLock(tmp_path, **QUICK):
        assert json.loads((tmp_path / LOCK).read_text())['token'] != 'planted'


@pytest.mark.parametrize('content', [None, '', '{"host": "x"}'])
def test_stale_lock_of_another_machine_or_unknown_run_is_taken_over(tmp_path, log, content):
    plant(tmp_path, host='elsewhere', kernel='another')
    if content is not None:
        (tmp_path / LOCK).write_text(content)
    before = time.time() - 1000
    os.utime(tmp_path / LOCK, (before, before))
    # The lock is taken over immediately: waiting for these intervals would exceed the timeout of the test.
    with WorkdirLock(tmp_path, heartbeat_seconds=60, stale_seconds=900):
        owner = ' on elsewhere' if content is None else 'an unknown run'
        assert f'{LOCK}: taken over from' in log.text
        assert owner in log.text


@pytest.mark.parametrize(
    'content', [b'', b'garbage', b'\xff\xfe\0', b'[1]', b'{"host": "x"}', b'{"token": "x"', b'[' * 10**5]
)
def test_fresh_file_that_is_not_a_lock_is_refused_immediately(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    # The error is raised immediately: waiting for these intervals would exceed the timeout of the test.
    with (
        pytest.raises(InputError, match=r'run\.lock was not written by maxlm; delete it if no run uses the dir'),
        WorkdirLock(tmp_path, heartbeat_seconds=600, stale_seconds=900),
    ):
        pass
    # A run may be about to write this file.
    assert (tmp_path / LOCK).read_bytes() == content
    assert names(tmp_path) == [LOCK]


def test_a_lock_of_another_version_is_watched(tmp_path):
    plant(tmp_path, host='elsewhere', kernel='another')
    facts = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**facts, 'since_version': 9}))
    before = time.monotonic()
    with WorkdirLock(tmp_path, **QUICK):
        assert time.monotonic() - before >= QUICK['stale_seconds'] / 2


def test_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(lock.os, 'link', refuse)
    with WorkdirLock(tmp_path, **QUICK):
        assert names(tmp_path) == [LOCK]
        with pytest.raises(InputError, match=f'process {os.getpid()} '), WorkdirLock(tmp_path, **QUICK):
            pass
    assert names(tmp_path) == []


def test_lost_lock_is_reported_and_not_retaken(tmp_path):
    reasons, is_reported = [], threading.Event()

    def on_lost(reason):
        reasons.append(reason)
        is_reported.set()

    with WorkdirLock(tmp_path, on_lost=on_lost, heartbeat_seconds=0.05):
        owner = json.loads((tmp_path / LOCK).read_text())
        # A lock that was only removed is written again, without a report.
        (tmp_path / LOCK).unlink()
        while not (tmp_path / LOCK).exists():
            time.sleep(0.01)
        assert json.loads((tmp_path / LOCK).read_text()) == owner
        assert reasons == []
        plant(tmp_path, host='elsewhere')
        assert is_reported.wait(30)
    assert 'on elsewhere' in reasons[0]
    assert json.loads((tmp_path / LOCK).read_text())['token'] == 'planted'


def test_unwritable_directory(tmp_path):
    (tmp_path / 'file').touch()
    with (
        pytest.raises(InputError, match=r'run\.lock cannot be written: Not a directory'),
        WorkdirLock(tmp_path / 'file'),
    ):
        pass


def test_is_alive():
    me = this_process()
    assert is_alive(me) is True
    # Another process now has the same number.
    assert is_alive(dataclasses.replace(me, born='1')) is False
    assert is_alive(dataclasses.replace(me, pid=2**22 + 1)) is False
    # After a reboot, or from another container, process numbers are meaningless.
    assert is_alive(dataclasses.replace(me, kernel='another')) is None
