"""Lock of a workdir: WORKDIR/run.lock names its owner, which updates its modification time as a heartbeat.

The lock works on shared disks and does not depend on synchronized clocks. The age of a lock is the difference between
its modification time and that of a new file in the same directory. The file server sets both times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError, os_message
from maxlm.log import logger
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import NotRegularError, read_text

LOCK = 'run.lock'
HEARTBEAT_SECONDS = 10.0
# Without a heartbeat for this long, an owner whose process cannot be checked counts as dead.
STALE_SECONDS = 60.0
MAX_TRIES = 20


@dataclasses.dataclass(frozen=True)
class Owner:
    """Owner of a lock.

    Attributes:
        token: unique to this lock.
        host: host name.
        kernel: ID of the boot and the PID namespace. A `pid` can only be checked if it is the same.
        pid: process ID.
        born: start time of the process in ticks since boot. Distinguishes processes that reuse a pid.
        user: user who started the process.
        since: wall-clock start time, for messages.
    """

    token: str
    host: str
    kernel: str
    pid: int
    born: str
    user: str
    since: str

    def __str__(self) -> str:
        return f'process {self.pid} of {self.user} on {self.host} (since {self.since})'


def this_process() -> Owner:
    """Returns this process as an owner."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user ID without a name.
        user = str(os.getuid())
    now = datetime.datetime.now(datetime.UTC)
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        kernel=_kernel(),
        pid=os.getpid(),
        born=_start_ticks(os.getpid()),
        user=user,
        since=now.strftime('%Y-%m-%d %H:%M:%S UTC'),
    )


class _LockState(NamedTuple):
    """State of a lock.

    Attributes:
        holder: owner of the lock, or None if it is unknown.
        is_foreign: True if maxlm did not write the lock. If `holder` is None and this is False, another version of
            maxlm wrote it.
        heartbeat_time: time of the last heartbeat.
        age: seconds since the last heartbeat.
    """

    holder: Owner | None
    is_foreign: bool
    heartbeat_time: float
    age: float


def is_alive(owner: Owner) -> bool | None:
    """Returns True if the process of a lock is running, or None if this cannot be checked from this process."""
    if not owner.kernel or owner.kernel != _kernel():
        return None
    start_ticks = _start_ticks(owner.pid)
    if not start_ticks:
        try:
            os.kill(owner.pid, 0)
        except PermissionError:
            # The system may hide processes of other users.
            return None
        except ProcessLookupError:
            return False
    return start_ticks == owner.born


class WorkdirLock:
    """Exclusive lock of a workdir, held while the context is entered.

    A lock whose owner is dead is taken over with a warning. A lock of another machine is watched until its heartbeat
    times out. Thus a run that moved to a new machine resumes by itself, and a second run is rejected.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        on_lost: Callable[[str], None] = logger.error,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        """
        Args:
            workdir: existing directory.
            on_lost: called from a thread with the reason when another process has taken the lock. This process was
                suspended for too long and must not write any more.
            heartbeat_seconds: time between two heartbeats.
            stale_seconds: time without a heartbeat after which the lock of another machine is free.
        """
        self._workdir = workdir
        self._path = workdir / LOCK
        self._on_lost = on_lost
        self._heartbeat_seconds, self._stale_seconds = heartbeat_seconds, stale_seconds
        self._owner = this_process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat_loop, daemon=True, name='workdir-lock')

    def __enter__(self) -> WorkdirLock:
        """
        Raises:
            InputError: another process holds the lock, or the lock cannot be written.
        """
        try:
            self._acquire()
        except NotRegularError as error:
            raise InputError(f'{self._path}: {os_message(error)}; move it elsewhere') from error
        except OSError as error:
            raise InputError(
                f'--workdir={self._workdir}: {LOCK} cannot be written: {os_message(error)}; choose a writable directory'
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._holder() == self._owner:
                self._path.unlink()

    def _acquire(self) -> None:
        for _ in range(MAX_TRIES):
            if self._create():
                return
            state = self._read_state()
            if state is None:
                # The lock was removed between two reads.
                continue
            if state.is_foreign and state.age <= self._stale_seconds:
                # Without hard links, a starting run may have written its lock only in part.
                raise InputError(
                    f'--workdir={self._workdir}: {LOCK} was not written by maxlm; delete it if no run uses the '
                    'directory'
                )
            alive = is_alive(state.holder) if state.holder else None
            if alive is None:
                alive = self._shows_heartbeat(state)
            if alive:
                owner = state.holder or 'an unknown run'
                raise InputError(
                    f'--workdir={self._workdir}: in use by {owner}; stop that run, or choose another --workdir'
                )
            self._remove(state.holder)
        raise InputError(
            f'--workdir={self._workdir}: {LOCK} keeps changing because several runs start in it simultaneously; start '
            'a single run'
        )

    def _create(self) -> bool:
        """Creates the lock atomically. Returns False if a lock exists."""
        text = json.dumps(dataclasses.asdict(self._owner)) + '\n'
        draft = self._sibling('new')
        try:
            _write(draft, text, os.O_CREAT | os.O_EXCL)
            try:
                os.link(draft, self._path)
            except FileExistsError:
                return False
            except OSError:
                # Buckets mounted as directories have no links. On them, a file becomes visible when it is closed.
                try:
                    _write(self._path, text, os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    return False
            return True
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _sibling(self, label: str) -> Path:
        return self._path.with_name(f'.{LOCK}.{label}.{self._owner.token}')

    def _holder(self, path: Path | None = None) -> Owner | None:
        """Returns the owner of the lock, or None if it cannot be read.

        Raises:
            FileNotFoundError: there is no lock.
        """
        try:
            return Owner(**self._read_fields(path or self._path))
        except TypeError:
            return None

    def _read_fields(self, path: Path) -> dict[str, Any]:
        """Returns the fields of a lock, or {} if maxlm did not write it. Raises FileNotFoundError without a lock."""
        try:
            fields = parse_json(read_text(path))
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) and 'token' in fields else {}

    def _read_state(self) -> _LockState | None:
        """Reads the lock. Returns None if it was removed."""
        draft = self._sibling('age')
        try:
            _write(draft, '', os.O_CREAT)
            now = draft.stat().st_mtime
            # Opening the file refreshes its cached attributes on a shared disk.
            holder = self._holder()
            is_foreign = holder is None and not self._read_fields(self._path)
            heartbeat_time = self._path.stat().st_mtime
            return _LockState(holder, is_foreign, heartbeat_time, now - heartbeat_time)
        except FileNotFoundError:
            return None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _shows_heartbeat(self, first: _LockState) -> bool:
        """Returns True if a holder whose process cannot be checked sends a heartbeat before the timeout."""
        if first.age <= self._stale_seconds:
            logger.info(
                f'{self._path}: held by {first.holder or "an unknown run"}; waiting up to '
                f'{self._stale_seconds - max(first.age, 0):.0f} s for its next heartbeat'
            )
        state: _LockState | None = first
        watched = time.monotonic()
        # The second bound is for disks with wrong file times.
        while state and state.age <= self._stale_seconds and time.monotonic() - watched <= 2 * self._stale_seconds:
            time.sleep(self._heartbeat_seconds / 5)
            state = self._read_state()
            if state and (state.holder, state.heartbeat_time) != (first.holder, first.heartbeat_time):
                # A heartbeat, or another process that acquired the lock.
                return True
        return False

    def _remove(self, holder: Owner | None) -> None:
        """Removes the lock of a dead holder, unless another process has taken it over."""
        directory = os.open(self._workdir, os.O_RDONLY)
        try:
            # Some shared disks do not support flock. There, `_discard` handles concurrent takeovers.
            with contextlib.suppress(OSError):
                fcntl.flock(directory, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if self._holder() == holder:
                    self._discard(holder)
        finally:
            os.close(directory)

    def _discard(self, holder: Owner | None) -> None:
        # Rename instead of delete, because only the renamed lock shows reliably who owned it.
        gone = self._sibling('gone')
        self._path.rename(gone)
        if self._holder(gone) != holder:
            # Restore the lock of the faster process. If a third process has created one, the faster one detects the
            # loss.
            with contextlib.suppress(OSError):
                os.link(gone, self._path)
        else:
            logger.warning(f'{self._path}: taken over from {holder or "an unknown run"}, which is no longer running')
        gone.unlink()

    def _heartbeat_loop(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            try:
                holder = self._holder()
                if holder == self._owner:
                    # The server sets the time. The content stays the same, even if another process has just replaced
                    # it.
                    os.utime(self._path)
            except FileNotFoundError:
                # The lock was deleted, for example by a user.
                with contextlib.suppress(OSError):
                    self._create()
            except OSError:
                # The disk is temporarily unavailable.
                pass
            else:
                if holder != self._owner and not self._stop.is_set():
                    new_owner = holder or 'another run'
                    self._on_lost(f'{self._path}: taken over by {new_owner}, because this run sent no heartbeat')
                    return


def _write(path: Path, text: str, flags: int) -> None:
    with open(os.open(path, flags | os.O_WRONLY, 0o644), 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _kernel() -> str:
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _start_ticks(pid: int) -> str:
    """Returns the start time of a process in ticks since boot, or '' if it does not exist or has exited."""
    try:
        # The process name may contain any characters, including brackets.
        fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if fields[0] in 'ZX' else fields[19]
