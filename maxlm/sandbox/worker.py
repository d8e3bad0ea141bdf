"""Worker of the sandbox: a small interpreter without JAX, which is isolated once and forks for each program.

| process | lifetime | task |
|---|---|---|
| worker | pool | sets up isolation, waits for the server, removes the directory |
| server | pool | forks a monitor for each request and never reads a request itself |
| monitor | one program | starts, watches and stops the other processes, responds to the pool |
| init process, program, tests | one program | see `maxlm.sandbox.fork` |
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from typing import NoReturn

from maxlm.config.user_function import load_function
from maxlm.errors import InputError
from maxlm.sandbox import cgroup, monitor, syscalls
from maxlm.sandbox.files import remove
from maxlm.sandbox.fork import MAX_DESCRIPTORS
from maxlm.sandbox.isolation import Confinement, probe
from maxlm.sandbox.process.interpreter import send
from maxlm.sandbox.process_tree import ProcessTree, reap
from maxlm.sandbox.program.function_call import SINGLE_THREAD

# Modules imported most often by programs and tests.
PRELOADED_MODULES = (
    *('abc', 'array', 'bisect', 'collections', 'copy', 'dataclasses', 'datetime', 'decimal', 'enum', 'fractions'),
    *('functools', 'heapq', 'itertools', 'json', 'math', 'operator', 'random', 're', 'statistics', 'string', 'struct'),
    *('time', 'typing', 'unittest', 'encodings.ascii', 'encodings.latin_1'),
)
EXIT_CLOSED = 3


def main(connection: socket.socket, settings_text: str) -> NoReturn:
    """Serves requests on the socket with the settings in `settings_text`, a JSON text, until the pool closes it."""
    settings = json.loads(settings_text)
    # Programs find no modules of this package.
    del sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, hard))
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    without = frozenset(settings['without'])
    refused: dict[str, str] = {}
    tree = cgroup_parent = None
    folder = None
    try:
        try:
            tree = ProcessTree()
        except OSError as error:
            refused['memory watch'] = str(error)
        if 'memory watch' in without:
            tree = None
            refused['memory watch'] = 'disabled'
        try:
            if 'cgroup' in without:
                raise OSError('disabled')
            parent = cgroup.find_parent()
            cgroup_parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            refused['cgroup'] = str(error)
        confinement = Confinement(without, settings['readable'])
        if 'mount namespace' not in confinement.enabled:
            folder = confinement.folder = os.path.realpath(tempfile.mkdtemp(prefix='maxlm-sandbox-'))
            os.chmod(folder, 0o711)
        probe(confinement)
        confinement.unshare_worker_pids()
        refused |= confinement.refused
        mechanisms = sorted(confinement.enabled | ({'cgroup'} if cgroup_parent is not None else set()))
        mechanisms += ['memory watch'] if tree is not None else []
        hello = {'has': mechanisms, 'refused': refused, 'folder': folder}
    except Exception as error:
        report(connection, {'failed': f'{type(error).__name__}: {error}', 'folder': folder})
        raise SystemExit(1) from error
    gc.collect()
    gc.freeze()
    server_pid = os.fork()
    if server_pid == 0:
        serve(connection, confinement, tree, cgroup_parent, hello | import_functions(settings))
    connection.close()
    os.waitpid(server_pid, 0)
    if folder is not None:
        remove(folder)
    os._exit(0)


def report(connection: socket.socket, hello: dict) -> None:
    """Sends the first message of the worker, with its guarantees or the reason that it cannot run programs."""
    send(connection, monitor.PLAIN, json.dumps(hello).encode())


def import_functions(settings: dict) -> dict:
    """Imports the functions of the user, so that each call starts with them. Returns their error for the pool, or {}.

    It runs in the server, because a process with threads, which a module may start, cannot create namespaces.
    """
    sys.path += settings['path']
    os.environ.update(SINGLE_THREAD)
    try:
        for function in settings['functions']:
            load_function(**function)
    except InputError as error:
        return {'invalid': str(error)}
    gc.freeze()
    return {}


def serve(
    connection: socket.socket,
    confinement: Confinement,
    tree: ProcessTree | None,
    cgroup_parent: int | None,
    hello: dict,
) -> NoReturn:
    """Serves requests one at a time. Each request has its own fork, which exits afterwards."""
    if sys.platform.startswith('linux'):
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 'prctl')
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, 'prctl')
    report(connection, hello)
    while connection.recv(1, socket.MSG_PEEK):
        pid = os.fork()
        if pid == 0:
            try:
                if sys.platform.startswith('linux'):
                    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, 'prctl')
                monitor.monitor_next(connection, confinement, tree, cgroup_parent)
            finally:
                # Reports to the pool that there is no result.
                connection.shutdown(socket.SHUT_RDWR)
                os._exit(EXIT_CLOSED)
        if os.waitpid(pid, 0)[1] != 0:
            break
        reap()
    os._exit(0)
