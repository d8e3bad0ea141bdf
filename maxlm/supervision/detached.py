"""Starts a supervisor in its own session, where it survives the loss of the terminal, and stops it.

WORKDIR/logs/console-HOST.log gets the output, and WORKDIR/logs/console-HOST.pid the process ID. The supervisor locks
this file while it runs. Each host of a run has its own files. For a workdir in a bucket, they are in the directory logs
of the current directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, explain_os_errors
from maxlm.storage.filesystem import is_url
from maxlm.storage.regular_files import open_descriptor, read_text
from maxlm.workdir.lock import LOCK
from maxlm.workdir.run_storage import cache_directory

LOGS = 'logs'
# Maximum time to wait until the run holds its workdir. A later failure is only in the log.
START_SECONDS = 120.0
# Time after which `stop_detached` says that the run may hang. It keeps waiting, because a save can take minutes.
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2
_UNSAFE = re.compile(r'[^\w.-]+')


class DetachedFiles(NamedTuple):
    """Files of the detached supervisor of this host: its output, and its locked process ID."""

    log: Path
    pid: Path


def detached_files(workdir: str) -> DetachedFiles:
    """Returns the files for a workdir, a directory or a URL."""
    host = _UNSAFE.sub('-', socket.gethostname())
    folder, name = (
        (Path(LOGS), f'{_UNSAFE.sub("-", workdir)}-{host}') if is_url(workdir) else (Path(workdir, LOGS), host)
    )
    return DetachedFiles((folder / f'console-{name}.log').absolute(), (folder / f'console-{name}.pid').absolute())


def start_detached(workdir: str, run: Callable[[], int], *, cache: str) -> int:
    """Calls `run` in a new process without a terminal, and returns when its training has started or it has failed.

    Args:
        workdir: workdir of the run.
        run: function that supervises the command and returns its exit code.
        cache: cache directory of the command, which contains the lock of a run in a bucket.

    Returns:
        EXIT_DONE after a start, or the exit code of `run`.

    Raises:
        InputError: the workdir is unknown, not writable, or in use by a detached supervisor of this host.
    """
    if not workdir:
        raise InputError('--detach needs --workdir in the command, because the output goes to that directory')
    files = detached_files(workdir)
    created = [folder for folder in (files.log.parent, files.log.parent.parent) if not folder.exists()]
    with explain_os_errors(files.log, 'choose a writable --workdir'):
        files.log.parent.mkdir(parents=True, exist_ok=True)
        pid_file = os.fdopen(open_descriptor(str(files.pid), os.O_RDWR | os.O_CREAT), 'r+b', buffering=0)
        log = os.fdopen(open_descriptor(str(files.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 'ab')
    with pid_file, log:
        if not _lock(pid_file):
            raise InputError(
                f'--workdir={workdir}: the detached process {read_text(files.pid).strip()} is using it; stop it with '
                f'maxlm supervise --stop {_quoted(workdir)}'
            )
        lock = (cache_directory(workdir, cache) if is_url(workdir) else Path(workdir)) / LOCK
        before = _text_of(lock)
        shown = log.tell()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            # It shares the lock, which ends with the last process that has the file open.
            with explain_os_errors(files.pid, 'choose another --workdir'):
                pid_file.truncate(0)
                pid_file.write(f'{os.getpid()}\n'.encode())
            _leave_terminal(log)
            return run()
    status = _wait_for_start(workdir, pid, files, lock, before, shown)
    if status is None:
        return EXIT_DONE
    if created:
        # An invalid start leaves no files. Its output has been printed.
        with contextlib.suppress(OSError):
            files.log.unlink()
            files.pid.unlink()
            for folder in created:
                folder.rmdir()
    code = os.waitstatus_to_exitcode(status)
    return EXIT_FAILED if code < 0 else code


def stop_detached(workdir: str) -> int:
    """Sends SIGTERM to the detached supervisor of a workdir and waits until the run has saved and exited.

    Raises:
        InputError: there is no such supervisor on this host.
    """
    files = detached_files(workdir)
    with explain_os_errors(files.pid, 'give --stop the workdir of a run that --detach started on this host'):
        pid_file = os.fdopen(open_descriptor(str(files.pid), os.O_RDWR), 'r+b')
    with pid_file:
        if _lock(pid_file):
            raise InputError(f'--stop={workdir}: no detached run is running on this host; see the end of {files.log}')
        text = pid_file.read().strip()
        # A negative number, 0 or 1 would end other processes.
        if not text.isdigit() or int(text) <= 1:
            raise InputError(f'{files.pid}: not a process ID; find the process with ps, and use kill')
        pid = int(text)
        os.kill(pid, signal.SIGTERM)
        print(f'stopping process {pid}, which saves first', flush=True)
        slow = time.monotonic() + STOP_SECONDS
        while not _lock(pid_file):
            time.sleep(POLL_SECONDS)
            if time.monotonic() > slow:
                slow = math.inf
                print(
                    f'still running after {STOP_SECONDS:g} s: tail -f {shlex.quote(str(files.log))} shows its output; '
                    f'kill -KILL -- -{pid} ends it without a save',
                    flush=True,
                )
    print(f'stopped; its log is {files.log}')
    return EXIT_DONE


def _leave_terminal(log: BinaryIO) -> None:
    """Moves this process to a new session without a terminal, with its output in `log`."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)


def _wait_for_start(workdir: str, pid: int, files: DetachedFiles, lock: Path, before: str, shown: int) -> int | None:
    """Copies the log to stderr until the run has started. Returns the status of the process if it ended before."""
    end = time.monotonic() + START_SECONDS
    has_started = False
    while not has_started and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        has_started = _text_of(lock) not in ('', before)
        found, status = os.waitpid(pid, os.WNOHANG)
        with files.log.open('rb') as log:
            log.seek(shown)
            text = log.read()
            shown += len(text)
        sys.stderr.write(text.decode(errors='replace'))
        sys.stderr.flush()
        if found:
            return status
    quoted = _quoted(workdir)
    state = 'started' if has_started else f'still starting after {START_SECONDS:g} s'
    print(
        f'{state}: process {pid}, which continues without this terminal\n'
        f'watch:  maxlm monitor {quoted}\n'
        f'output: tail -f {shlex.quote(str(files.log))}\n'
        f'stop:   maxlm supervise --stop {quoted}'
    )
    return None


def _quoted(workdir: str) -> str:
    """Returns a workdir as an argument of a command in a shell. It is not an option, even if it begins with `-`."""
    return shlex.quote(f'./{workdir}' if workdir.startswith('-') else workdir)


def _text_of(lock: Path) -> str:
    """Returns the text of the run's lock; '' without a lock."""
    with contextlib.suppress(OSError):
        return read_text(lock)
    return ''


def _lock(file: BinaryIO | FileIO) -> bool:
    """Locks a file until its descriptor is closed. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
