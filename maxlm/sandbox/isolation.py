"""The walls around a program, built as far as the machine allows, and named.

A worker builds what all its programs share (namespaces, a root folder that holds only Python) once; each program adds
its own (process numbers, folder, limits, identity, Landlock, seccomp). What the kernel refuses is left out, with the
reason.

| mechanism | needs |
|---|---|
| `mount`, `network`, `process`, `ipc namespace` | root, or user namespaces for everybody |
| `own user` | root, and a Python that other users can read |
| `cgroup` | a cgroup v2 that is ours, with memory and pids |
| `landlock`, `seccomp` | a kernel with them; nobody's permission |
"""

from __future__ import annotations

import functools
import math
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from maxlm.sandbox import landlock, python_paths, seccomp, syscalls
from maxlm.sandbox.limits import SandboxLimits

NAMESPACES = {
    'mount namespace': syscalls.CLONE_NEWNS,
    'network namespace': syscalls.CLONE_NEWNET,
    'ipc namespace': syscalls.CLONE_NEWIPC,
}
PROCESS_NAMESPACE = 'process namespace'
MECHANISMS = (*NAMESPACES, PROCESS_NAMESPACE, 'own user', 'user namespace', 'landlock', 'seccomp', 'cgroup')
# Not a mechanism but a privilege; without it a worker does as one that an ordinary user has started.
ROOT = 'root'
# Where a new root folder can be put up; what lies there is only hidden, in the worker's own view of files.
MOUNT_POINTS = ('/mnt', '/media', '/srv', '/opt', '/tmp')
WORK_FOLDER = '/tmp'
# Identities that no account has, out of reach of what is left of a program that went before.
FIRST_USER, NUM_USERS = 0x40000000, 1 << 28
# The worker's own processes, which count for the same user where all have one identity.
OWN_PROCESSES = 8
PENDING_SIGNALS = 64


class IsolationError(Exception):
    """A mechanism that the machine does not give."""

    def __init__(self, mechanism: str, error: Exception):
        super().__init__(f'{mechanism}: {error}')
        self.mechanism = mechanism


class Users(NamedTuple):
    """The identities of the tests and of the program, so that neither can touch the other."""

    tests: int
    program: int


class Confinement:
    """What a worker has built, and how each of its processes is shut in.

    has: the mechanisms in use. refused: mechanism to the kernel's reason. users: where the worker may change identity.
    """

    def __init__(self, without: frozenset[str], folder: str | None = None):
        """Builds the worker's share. `folder`: where programs get their folders if there is no mount namespace."""
        self.without = without
        self.folder = folder
        self.has: set[str] = set()
        self.refused: dict[str, str] = {}
        self.users: Users | None = None
        self.readable = python_paths.readable_paths()
        self.devices = python_paths.devices()
        if not sys.platform.startswith('linux'):
            self.refused = dict.fromkeys(MECHANISMS, 'the machine does not run Linux')
            return
        # The interpreter may lie in a home that only root can enter: the current folder is a way in that stays.
        os.chdir(sys.base_prefix)
        if ROOT in without and os.geteuid() == 0:
            drop_to_user(FIRST_USER + secrets.randbelow(NUM_USERS))
        self.root = os.geteuid() == 0
        if self.root:
            first = FIRST_USER + 2 * secrets.randbelow(NUM_USERS)
            self.users = Users(first, first + 1)
            self.attempt('own user', lambda: None)
        else:
            self.attempt('user namespace', new_user_namespace)
        for name, flag in NAMESPACES.items():
            self.attempt(name, functools.partial(syscalls.unshare, flag))
        if 'mount namespace' in self.has:
            self.attempt('mount namespace', self.build_root)
        self.attempt('landlock', landlock.version)
        self.has |= {'seccomp'} - without

    def attempt(self, mechanism: str, build: Callable[[], object]) -> None:
        """Builds it unless it is switched off; an OSError is remembered as the reason that it is missing."""
        if mechanism in self.without:
            self.leave_out(mechanism, 'switched off')
            return
        try:
            build()
        except OSError as error:
            self.leave_out(mechanism, str(error))
        else:
            self.has.add(mechanism)

    def leave_out(self, mechanism: str, reason: str) -> None:
        """Goes on without it."""
        self.has.discard(mechanism)
        self.refused[mechanism] = reason
        if mechanism == 'own user':
            self.users = None

    def build_root(self) -> None:
        """A root folder of Python's files, read-only, at the paths that they have anyway."""
        used = [*self.readable, *self.devices]
        points = (point for point in MOUNT_POINTS if os.path.isdir(point))
        free = (point for point in points if not any(path.startswith(f'{point}/') for path in used))
        point = next(free, None)
        if point is None:
            raise OSError('no folder to put up a root folder at')
        here, links = sys.base_prefix, python_paths.links()
        syscalls.mount('none', '/', None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount('tmpfs', point, 'tmpfs', flags, 'size=1m,nr_inodes=1000,mode=755')
        for path in used:
            target = point + path
            inside = path == here or path.startswith(f'{here}/')
            source = os.path.join('.', os.path.relpath(path, here)) if inside else path
            if os.path.isdir(source):
                os.makedirs(target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
            syscalls.make_read_only(target)
        for path, target in links.items():
            if not os.path.lexists(point + path):
                os.symlink(target, point + path)
        os.makedirs(point + WORK_FOLDER, exist_ok=True)
        os.symlink(WORK_FOLDER, f'{point}/dev/shm')
        syscalls.change_root(point)
        syscalls.mount('none', '/', None, flags | syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY)

    def number_the_worker(self) -> None:
        """The next child of this process is number 1 of its own, sees no others, and ends with all of its own.

        To be called last: a process can have only one such child.
        """
        if sys.platform.startswith('linux'):
            self.attempt(PROCESS_NAMESPACE, lambda: syscalls.unshare(syscalls.CLONE_NEWPID))

    def number_the_program(self) -> None:
        """The same for a program, where the worker could do it."""
        if PROCESS_NAMESPACE in self.has:
            syscalls.unshare(syscalls.CLONE_NEWPID)

    def new_folder(self, limits: SandboxLimits, folder: str | None) -> str:
        """An empty folder that ends with the process, its size limited; without a mount namespace it is `folder`."""
        if 'ipc namespace' in self.has:
            syscalls.unshare(syscalls.CLONE_NEWIPC)
        if 'mount namespace' not in self.has:
            assert folder is not None
            return folder
        syscalls.unshare(syscalls.CLONE_NEWNS)
        options = f'size={limits.disk_bytes},nr_inodes={limits.files + 1},mode=777'
        syscalls.mount('tmpfs', WORK_FOLDER, 'tmpfs', syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
        return WORK_FOLDER

    def shut_in(self, limits: SandboxLimits, folder: str, *, is_program: bool) -> None:
        """This process, for good: no privileges, the limits, one folder. Refused names the mechanism that failed."""
        os.chdir(folder)
        set_limits(limits, own_processes=0 if self.users else OWN_PROCESSES)
        if not sys.platform.startswith('linux'):
            return
        if self.users:
            drop_to_user(self.users.program if is_program else self.users.tests)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 'prctl')
        syscalls.drop_capabilities()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, 'prctl')
        if 'landlock' in self.has:
            try:
                landlock.restrict([*self.readable, *self.devices], [folder, '/dev/null', '/dev/zero'])
            except OSError as error:
                raise IsolationError('landlock', error) from error
        if 'seccomp' in self.has:
            try:
                seccomp.restrict(
                    only_itself=PROCESS_NAMESPACE not in self.has, paths_shown='mount namespace' not in self.has
                )
            except OSError as error:
                raise IsolationError('seccomp', error) from error


def drop_to_user(user: int) -> None:
    """This process gets the identity `user`, for good, and stays one that its own files in /proc belong to."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1, 'prctl')


def new_user_namespace() -> None:
    """Privileges over new namespaces for a process without any; it keeps its identity."""
    user, group = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{user} {user} 1'), ('gid_map', f'{group} {group} 1')):
        with open(f'/proc/self/{name}', 'w', encoding='ascii') as file:
            file.write(text)


def user_processes() -> int:
    """Processes and threads of this user, which a limit per user counts too; 0 where /proc does not tell."""
    count = 0
    for name in os.listdir('/proc') if os.path.isdir('/proc') else []:
        try:
            if name.isdigit() and os.stat(f'/proc/{name}').st_uid == os.getuid():
                count += len(os.listdir(f'/proc/{name}/task'))
        except OSError:
            continue
    return count


def set_limits(limits: SandboxLimits, *, own_processes: int) -> None:
    """The limits that the kernel holds for each process."""
    cpu = math.ceil(limits.cpu_seconds)
    processes = limits.processes + (own_processes and own_processes + user_processes())
    wanted = {
        'RLIMIT_CPU': (cpu, cpu + 1),
        'RLIMIT_AS': limits.memory_bytes,
        'RLIMIT_FSIZE': limits.file_bytes,
        'RLIMIT_NOFILE': limits.open_files,
        'RLIMIT_NPROC': processes,
        'RLIMIT_CORE': 0,
        'RLIMIT_MEMLOCK': 0,
        'RLIMIT_MSGQUEUE': 0,
        'RLIMIT_SIGPENDING': PENDING_SIGNALS,
    }
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        soft, hard = value if isinstance(value, tuple) else (value, value)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def trial(confinement: Confinement) -> None:
    """Shuts in children until one can work, leaving out what fails; RuntimeError if Python itself is out of reach."""
    while True:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try_once(confinement, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            failed, _, reason = pipe.read().partition('\n')
        os.waitpid(child, 0)
        if failed == 'ok':
            return
        if failed not in confinement.has:
            raise RuntimeError(f'no program can be run in the sandbox: {reason or "the trial process died"}')
        confinement.leave_out(failed, reason)


def try_once(confinement: Confinement, writer: int) -> NoReturn:
    """The child: is shut in as a program is, reads a file of the standard library, says what stopped it."""
    answer = '\nthe trial process failed'
    try:
        folder = confinement.new_folder(SandboxLimits(), confinement.folder)
        confinement.shut_in(SandboxLimits(), folder, is_program=True)
        answer = 'ok\n'
        with open(os.__file__, 'rb') as file:
            file.read(1)
    except IsolationError as error:
        answer = f'{error.mechanism}\n{error}'
    except OSError as error:
        # Whoever cannot read Python's files is one user too many; anything else speaks for itself.
        answer = f'{"own user" if confinement.users else ""}\n{error}'
    finally:
        os.write(writer, answer.encode())
        os._exit(0)
