"""Processes of one program, forked from a worker that has never read a program or a test.

The init process starts the program's process, waits for it and reports how it ended. In a process namespace, all
processes of the program end with the init process. Tests run in a separate process.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from maxlm.sandbox import syscalls
from maxlm.sandbox.isolation import Confinement
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.program.execute import run_text
from maxlm.sandbox.program.rpc_protocol import Channel
from maxlm.sandbox.program.unit_tests import run_tests

# Descriptors of the program's and the tests' process, after the three standard streams.
CHANNEL, COMMAND, REPORT, CGROUP_PROCS = 3, 4, 5, 6
# Descriptor limit of a worker, which keeps closing all descriptors fast.
MAX_DESCRIPTORS = 256
FIRST_FREE_DESCRIPTOR = 100
MAX_COMMAND_BYTES = 1 << 30
# Exit code of a process whose isolation failed before it ran any of the program.
EXIT_NOT_ISOLATED = 121


def fork(child: Callable[[], object]) -> int:
    """Runs `child` in a new process, which always exits afterwards, and returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child()
    except BaseException as error:
        os.write(2, f'sandbox: {type(error).__name__}: {error}\n'.encode(errors='replace'))
    finally:
        os._exit(EXIT_NOT_ISOLATED)


def remap_descriptors(descriptors: list[int]) -> None:
    """Renumbers the descriptors to 0, 1, 2 … and closes all others."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_FREE_DESCRIPTOR) for descriptor in descriptors]
    for index, descriptor in enumerate(high):
        os.dup2(descriptor, index)
    os.closerange(len(descriptors), MAX_DESCRIPTORS)


def read_command(descriptor: int) -> dict:
    """Reads a JSON command up to the end of the pipe. Returns {} if the monitor has exited."""
    with os.fdopen(descriptor, 'rb') as pipe:
        data = pipe.read(MAX_COMMAND_BYTES)
    return json.loads(data) if data else {}


def init_process(confinement: Confinement, descriptors: list[int]) -> NoReturn:
    """Runs the program in a child process and reports its exit code and CPU seconds as JSON."""
    remap_descriptors(descriptors)
    os.setsid()
    if sys.platform.startswith('linux'):
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 'prctl')
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, 'prctl')
    os.write(CGROUP_PROCS, b'0')
    command = read_command(COMMAND)
    if not command:
        os._exit(0)
    limits = SandboxLimits(**command['limits'])
    folder = confinement.new_folder(limits, command['folder'])

    def program() -> None:
        os.closerange(CHANNEL + 1 if command['tested'] else CHANNEL, MAX_DESCRIPTORS)
        confinement.enter(limits, folder, is_program=True, has_tests=command['tested'])
        run_text(command['text'], Channel(CHANNEL) if command['tested'] else None, folder)

    pid = fork(program)
    # Close this process's copies, so that the program's streams and the tests' channel close when the program exits.
    remap_descriptors([os.open(os.devnull, os.O_RDWR)] * 4 + [REPORT, REPORT])
    while True:
        ended_pid, status, usage = os.wait4(-1, 0)
        if ended_pid == pid:
            break
    result = {'code': os.waitstatus_to_exitcode(status), 'cpu': usage.ru_utime + usage.ru_stime}
    os.write(REPORT, json.dumps(result).encode())
    os._exit(0)


def tests_process(confinement: Confinement, descriptors: list[int]) -> NoReturn:
    """Runs the tests and reports the result of each as a line of JSON."""
    remap_descriptors(descriptors)
    os.setsid()
    command = read_command(COMMAND)
    if not command:
        os._exit(0)
    limits = SandboxLimits(**command['limits'])
    folder = confinement.new_folder(limits, command['folder'])
    # The CPU limit is for the program. Tests are limited by the wall time only.
    confinement.enter(limits._replace(cpu_seconds=limits.wall_seconds), folder, is_program=False, has_tests=True)

    def report(line: list) -> None:
        os.write(REPORT, json.dumps(line).encode() + b'\n')

    run_tests(command['tests'], Channel(CHANNEL), report)
    os._exit(0)
