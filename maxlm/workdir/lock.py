"""One writer per workdir: WORKDIR/run.lock, which says who it is, and is kept young as long as that one lives.

It works on disks that machines share. Nothing is taken from their clocks: the age of a lock is the difference to the
time of a file that has just been written beside it, for which the disk's own server has set both.
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
# Without a heartbeat the owner is taken to be gone, if it cannot be asked for.
STALE_SECONDS = 60.0
MAX_TRIES = 20


@dataclasses.dataclass(frozen=True)
class Owner:
    """The owner of a lock.

    Attributes:
        token: unique to this lock.
        host: name of the machine.
        kernel: changes with every boot and every container: only within one and the same can a `pid` be looked up.
        pid: of the process.
        born: when the kernel started it, in ticks since boot; two processes of one pid differ in it.
        user: who started it.
        since: wall clock at the start, for people.
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
    """The owner that this process would be."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number without a name.
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
    """A lock at one moment.

    `holder` is None if nobody can be made out: another version of maxlm wrote the lock, or, with `is_foreign`, none.
    """

    holder: Owner | None
    is_foreign: bool
    # Time of its last sign of life, and the seconds since.
    heartbeat_time: float
    age: float


def is_alive(owner: Owner) -> bool | None:
    """Returns whether the process of a lock runs; None where that cannot be seen from here."""
    if not owner.kernel or owner.kernel != _kernel():
        return None
    born = _start_ticks(owner.pid)
    if not born:
        try:
            os.kill(owner.pid, 0)
        except PermissionError:
            # Another user's, which the system may hide.
            return None
        except ProcessLookupError:
            return False
    return born == owner.born


class WorkdirLock:
    """While entered, this process alone writes into a workdir.

    A lock whose owner is gone is taken over with a warning. One of another machine is watched for as long as an owner
    may be silent, so that a run which was moved goes on by itself, and a second one is refused.
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
            workdir: directory that is there.
            on_lost: called from a thread, with the reason, when somebody else has taken the lock: this process was
                away for so long that it seemed dead, and must not write any more.
            heartbeat_seconds: between two signs of life.
            stale_seconds: without one after which the lock of another machine is free.
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
            InputError: somebody else holds the lock, or it cannot be written.
        """
        try:
            self._acquire()
        except NotRegularError as error:
            raise InputError(f'{self._path}: {os_message(error)}; move it elsewhere') from error
        except OSError as error:
            raise InputError(f'--workdir={self._workdir}: {LOCK} cannot be written: {os_message(error)}') from error
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
                # Gone between two looks.
                continue
            if state.is_foreign and state.age <= self._stale_seconds:
                # On a disk without hard links, a run that is starting may not have written all of it.
                raise InputError(
                    f'--workdir={self._workdir}: {LOCK} is not a lock that maxlm wrote; delete it if no run uses the '
                    f'directory'
                )
            alive = is_alive(state.holder) if state.holder else None
            if alive is None:
                alive = self._shows_heartbeat(state)
            if alive:
                owner = state.holder or 'a run that cannot be named'
                raise InputError(
                    f'--workdir={self._workdir}: in use by {owner}; stop that run, or choose another --workdir'
                )
            self._remove(state.holder)
        raise InputError(f'--workdir={self._workdir}: {LOCK} changes all the time: several runs start on it at once')

    def _create(self) -> bool:
        """Makes the lock; False if there is one. Nobody sees it half written."""
        text = json.dumps(dataclasses.asdict(self._owner)) + '\n'
        draft = self._sibling('new')
        try:
            _write(draft, text, os.O_CREAT | os.O_EXCL)
            try:
                os.link(draft, self._path)
            except FileExistsError:
                return False
            except OSError:
                # Buckets that are mounted as directories have no links; with them a file appears when it is closed.
                try:
                    _write(self._path, text, os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    return False
            return True
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _sibling(self, word: str) -> Path:
        return self._path.with_name(f'.{LOCK}.{word}.{self._owner.token}')

    def _holder(self, path: Path | None = None) -> Owner | None:
        """Returns the owner named in the lock; None if it cannot be read.

        Raises:
            FileNotFoundError: there is no lock.
        """
        try:
            return Owner(**self._read_fields(path or self._path))
        except TypeError:
            return None

    def _read_fields(self, path: Path) -> dict[str, Any]:
        """Returns the content of a lock, {} if maxlm did not write it. Raises FileNotFoundError if there is no lock."""
        try:
            fields = parse_json(read_text(path))
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) and 'token' in fields else {}

    def _read_state(self) -> _LockState | None:
        """Reads the lock; returns None if there is none any more."""
        draft = self._sibling('age')
        try:
            _write(draft, '', os.O_CREAT)
            now = draft.stat().st_mtime
            # Opening it brings the facts of a shared disk up to date.
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
        """Returns whether a holder whose process cannot be looked up shows a sign of life before its time is up."""
        if first.age <= self._stale_seconds:
            logger.info(
                f'{self._path}: held by {first.holder or "a run that cannot be named"}; waiting up to '
                f'{self._stale_seconds - max(first.age, 0):.0f} s for a sign of life'
            )
        state: _LockState | None = first
        watched = time.monotonic()
        # The second bound is for a disk whose times are nonsense.
        while state and state.age <= self._stale_seconds and time.monotonic() - watched <= 2 * self._stale_seconds:
            time.sleep(self._heartbeat_seconds / 5)
            state = self._read_state()
            if state and (state.holder, state.heartbeat_time) != (first.holder, first.heartbeat_time):
                # A beat, or somebody who was faster.
                return True
        return False

    def _remove(self, holder: Owner | None) -> None:
        """Takes away the lock of a holder that is gone, unless another has been faster."""
        directory = os.open(self._workdir, os.O_RDONLY)
        try:
            # Not all shared disks have this; there, what is below makes do.
            with contextlib.suppress(OSError):
                fcntl.flock(directory, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if self._holder() == holder:
                    self._discard(holder)
        finally:
            os.close(directory)

    def _discard(self, holder: Owner | None) -> None:
        # Renamed and not deleted: only then is it known whose it was.
        gone = self._sibling('gone')
        self._path.rename(gone)
        if self._holder(gone) != holder:
            # The new lock of somebody who was faster goes back; if a third is there already, the second will notice.
            with contextlib.suppress(OSError):
                os.link(gone, self._path)
        else:
            logger.warning(f'{self._path}: taken over from {holder or "a run that cannot be named"}, which is gone')
        gone.unlink()

    def _heartbeat_loop(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            try:
                holder = self._holder()
                if holder == self._owner:
                    # The time is the server's, and the content stays whosever it is by now.
                    os.utime(self._path)
            except FileNotFoundError:
                # Somebody has tidied up.
                with contextlib.suppress(OSError):
                    self._create()
            except OSError:
                # A disk that is away for a moment.
                pass
            else:
                if holder != self._owner and not self._stop.is_set():
                    new_owner = holder or 'another run'
                    self._on_lost(f'{self._path}: taken by {new_owner}, since this one gave no sign of life')
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
    """Ticks from boot to the start of a process; '' if there is none, or only its exit code is left."""
    try:
        # The name may hold anything, brackets too.
        fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if fields[0] in 'ZX' else fields[19]
