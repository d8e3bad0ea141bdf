"""Isolation of programs with the mechanisms that the machine supports.

A worker sets up the shared parts once: namespaces, and a root directory that contains only Python. Each program adds
its own process ids, directory, limits, user, Landlock and seccomp. Mechanisms that the kernel refuses are skipped, and
the reason is recorded.

| mechanism | needs |
|---|---|
| `mount`, `network`, `process`, `ipc namespace` | root, or unprivileged user namespaces |
| `own user` | root, and a Python that other users can read |
| `cgroup` | a delegated cgroup v2 with memory and pids |
| `landlock`, `seccomp` | kernel support; no privileges |
"""

from __future__ import annotations

import functools
import math
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
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
# A privilege instead of a mechanism: without it, a worker behaves as if started by an ordinary user.
ROOT = 'root'
# Candidates for the mount point of the new root. Their files are hidden only in the worker's mount namespace.
MOUNT_POINTS = ('/mnt', '/media', '/srv', '/opt', '/tmp')
# Candidates for a program's directory. It hides files below the same path.
WORK_FOLDERS = ('/tmp', '/sandbox')
# User ids without an account. Random ids isolate a program from leftovers of earlier programs.
FIRST_USER, NUM_USERS = 0x40000000, 1 << 28
# Number of sandbox processes for each program: worker, server, monitor and init process. They count toward the process
# limit if all processes have the same user.
OWN_PROCESSES = 4
PENDING_SIGNALS = 64


class IsolationError(Exception):
    """Raised if the machine does not support a mechanism."""

    def __init__(self, mechanism: str, error: Exception):
        super().__init__(f'{mechanism}: {error}')
        self.mechanism = mechanism


class Users(NamedTuple):
    """User ids of the tests and of the program, which differ so that neither can affect the other."""

    tests: int
    program: int


class Confinement:
    """Isolation that a worker sets up and each of its processes enters.

    Attributes:
        enabled: mechanisms in use.
        refused: mechanism → reason that it is not in use.
        users: user ids of tests and program if the worker may change users, else None.
    """

    def __init__(self, without: frozenset[str], readable: Sequence[str] = ()):
        """Sets up the worker's part. Programs may read the `readable` directories in addition to Python's files."""
        self.without = without
        # Contains the programs' directories if there is no mount namespace.
        self.folder: str | None = None
        self.enabled: set[str] = set()
        self.refused: dict[str, str] = {}
        self.users: Users | None = None
        self.readable = python_paths.readable_paths(readable)
        self.work_folder = next(
            folder for folder in WORK_FOLDERS if not any(is_within(path, folder) for path in self.readable)
        )
        self.devices = python_paths.devices()
        if not sys.platform.startswith('linux'):
            self.refused = dict.fromkeys(MECHANISMS, 'requires Linux')
            return
        # The interpreter may be below a directory that only root can enter. The working directory stays accessible.
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
        if 'mount namespace' in self.enabled:
            self.attempt('mount namespace', self.build_root)
        self.attempt('landlock', landlock.version)
        self.enabled |= {'seccomp'} - without

    def attempt(self, mechanism: str, build: Callable[[], object]) -> None:
        """Sets up a mechanism unless it is switched off. Records an OSError as the reason that it is missing."""
        if mechanism in self.without:
            self.disable(mechanism, 'disabled')
            return
        try:
            build()
        except OSError as error:
            self.disable(mechanism, str(error))
        else:
            self.enabled.add(mechanism)

    def disable(self, mechanism: str, reason: str) -> None:
        """Disables a mechanism."""
        self.enabled.discard(mechanism)
        self.refused[mechanism] = reason
        if mechanism == 'own user':
            self.users = None

    def build_root(self) -> None:
        """Mounts a read-only root directory that contains Python's files at their usual paths."""
        paths = [*self.readable, *self.devices]
        points = (point for point in MOUNT_POINTS if os.path.isdir(point))
        free = (point for point in points if not any(is_within(path, point) for path in paths))
        point = next(free, None)
        if point is None:
            raise OSError('no directory is available as a mount point')
        base_prefix, links = sys.base_prefix, python_paths.links()
        syscalls.mount('none', '/', None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount('tmpfs', point, 'tmpfs', flags, 'size=1m,nr_inodes=1000,mode=755')
        for path in paths:
            target = point + path
            inside = is_within(path, base_prefix)
            source = os.path.join('.', os.path.relpath(path, base_prefix)) if inside else path
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
        os.makedirs(point + self.work_folder, exist_ok=True)
        os.symlink(self.work_folder, f'{point}/dev/shm')
        syscalls.change_root(point)
        syscalls.mount('none', '/', None, flags | syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY)

    def unshare_worker_pids(self) -> None:
        """Puts the next child of this process into a process namespace.

        The child has process id 1 and cannot see other processes. The namespace ends with it.
        Must be called last, because a process can have only one such child.
        """
        if sys.platform.startswith('linux'):
            self.attempt(PROCESS_NAMESPACE, lambda: syscalls.unshare(syscalls.CLONE_NEWPID))

    def unshare_program_pids(self) -> None:
        """Puts the program into its own process namespace if the worker has one."""
        if PROCESS_NAMESPACE in self.enabled:
            syscalls.unshare(syscalls.CLONE_NEWPID)

    def new_folder(self, limits: SandboxLimits, folder: str | None) -> str:
        """Returns an empty directory of limited size that is removed with the process.

        Without a mount namespace, returns `folder` unchanged.
        """
        if 'ipc namespace' in self.enabled:
            syscalls.unshare(syscalls.CLONE_NEWIPC)
        if 'mount namespace' not in self.enabled:
            assert folder is not None
            return folder
        syscalls.unshare(syscalls.CLONE_NEWNS)
        options = f'size={limits.disk_bytes},nr_inodes={limits.files + 1},mode=777'
        syscalls.mount('tmpfs', self.work_folder, 'tmpfs', syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
        return self.work_folder

    def other_processes(self, limits: SandboxLimits, *, is_program: bool, has_tests: bool) -> int:
        """Returns the number of processes, except this one and its descendants, that the kernel's limit counts."""
        if self.users:
            return 0
        known = OWN_PROCESSES + (has_tests if is_program else limits.processes)
        # The limit of a user namespace counts only the processes in it.
        return known if 'user namespace' in self.enabled else max(known, user_processes() - 1)

    def enter(self, limits: SandboxLimits, folder: str, *, is_program: bool, has_tests: bool) -> None:
        """Isolates this process permanently: no privileges, limits, one directory. Raises IsolationError on failure."""
        os.chdir(folder)
        set_limits(limits, other_processes=self.other_processes(limits, is_program=is_program, has_tests=has_tests))
        if not sys.platform.startswith('linux'):
            return
        if self.users:
            drop_to_user(self.users.program if is_program else self.users.tests)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 'prctl')
        syscalls.drop_capabilities()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1, 'prctl')
        if 'landlock' in self.enabled:
            try:
                landlock.restrict([*self.readable, *self.devices], [folder, '/dev/null', '/dev/zero'])
            except OSError as error:
                raise IsolationError('landlock', error) from error
        if 'seccomp' in self.enabled:
            try:
                seccomp.restrict(
                    own_process_only=PROCESS_NAMESPACE not in self.enabled,
                    files_visible='mount namespace' not in self.enabled,
                )
            except OSError as error:
                raise IsolationError('seccomp', error) from error


def is_within(path: str, folder: str) -> bool:
    """Returns True if a path is a directory or below it."""
    return path == folder or path.startswith(f'{folder}/')


def drop_to_user(user: int) -> None:
    """Changes the user of this process permanently and keeps its files in /proc owned by that user."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1, 'prctl')


def new_user_namespace() -> None:
    """Creates a user namespace in which an unprivileged process may create other namespaces. Keeps the user id."""
    user, group = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{user} {user} 1'), ('gid_map', f'{group} {group} 1')):
        with open(f'/proc/self/{name}', 'w', encoding='ascii') as file:
            file.write(text)


def user_processes() -> int:
    """Returns the number of processes and threads of this user, which a per-user limit counts; 0 without /proc."""
    count = 0
    for name in os.listdir('/proc') if os.path.isdir('/proc') else []:
        try:
            if name.isdigit() and os.stat(f'/proc/{name}').st_uid == os.getuid():
                count += len(os.listdir(f'/proc/{name}/task'))
        except OSError:
            continue
    return count


def set_limits(limits: SandboxLimits, *, other_processes: int) -> None:
    """Sets the resource limits (rlimits) of this process."""
    cpu = math.ceil(limits.cpu_seconds)
    rlimits = {
        'RLIMIT_CPU': (cpu, cpu + 1),
        'RLIMIT_AS': limits.memory_bytes,
        'RLIMIT_FSIZE': limits.file_bytes,
        'RLIMIT_NOFILE': limits.open_files,
        'RLIMIT_NPROC': limits.processes + other_processes,
        'RLIMIT_CORE': 0,
        'RLIMIT_MEMLOCK': 0,
        'RLIMIT_MSGQUEUE': 0,
        'RLIMIT_SIGPENDING': PENDING_SIGNALS,
    }
    for name, value in rlimits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        soft, hard = value if isinstance(value, tuple) else (value, value)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def probe(confinement: Confinement) -> None:
    """Isolates child processes until one works, and disables mechanisms that fail.

    Raises:
        RuntimeError: Python cannot run isolated.
    """
    while True:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            probe_once(confinement, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            failed, _, reason = pipe.read().partition('\n')
        os.waitpid(child, 0)
        if failed == 'ok':
            return
        if failed not in confinement.enabled:
            raise RuntimeError(f'the sandbox cannot run programs: {reason or "the probe process died"}')
        confinement.disable(failed, reason)


def probe_once(confinement: Confinement, writer: int) -> NoReturn:
    """Enters isolation as a program does, reads a file of the standard library, and reports failures to `writer`."""
    message = '\nthe probe process failed'
    try:
        folder = confinement.new_folder(SandboxLimits(), confinement.folder)
        confinement.enter(SandboxLimits(), folder, is_program=True, has_tests=False)
        message = 'ok\n'
        with open(os.__file__, 'rb') as file:
            file.read(1)
    except IsolationError as error:
        message = f'{error.mechanism}\n{error}'
    except OSError as error:
        # If a separate user cannot read Python's files, disable 'own user'. Other errors have no remedy.
        message = f'{"own user" if confinement.users else ""}\n{error}'
    finally:
        os.write(writer, message.encode())
        os._exit(0)
