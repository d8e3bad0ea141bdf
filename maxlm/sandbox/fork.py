"""The processes of one program: forks of a worker that has never read a program or a test.

The first process of the program starts the program's own, waits for it and reports how it ended; where programs have
process numbers of their own, all of them end with the first. The tests have a process beside these.
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

# Descriptors of the program's and of the tests' process; the first three are the standard streams.
TALK, ORDER, REPORT, ENTRANCE = 3, 4, 5, 6
# Of a worker, so that closing all others takes no time even where the kernel closes them one by one.
MOST_DESCRIPTORS = 256
OUT_OF_THE_WAY = 100
LARGEST_ORDER = 1 << 30
# Of a process that could not be shut in; it has not run a line of the program.
EXIT_NOT_CONFINED = 121


def fork(child: Callable[[], object]) -> int:
    """Runs `child` in a new process, which ends with it whatever happens; the process's number."""
    number = os.fork()
    if number:
        return number
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child()
    except BaseException as error:
        os.write(2, f'sandbox: {type(error).__name__}: {error}\n'.encode(errors='replace'))
    finally:
        os._exit(EXIT_NOT_CONFINED)


def arrange(descriptors: list[int]) -> None:
    """The descriptors become 0, 1, 2 …; all others are closed."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, OUT_OF_THE_WAY) for descriptor in descriptors]
    for place, descriptor in enumerate(high):
        os.dup2(descriptor, place)
    os.closerange(len(descriptors), MOST_DESCRIPTORS)


def read_order(descriptor: int) -> dict:
    """What to do, in JSON up to the end of the pipe; {} if the judge has gone."""
    with os.fdopen(descriptor, 'rb') as pipe:
        data = pipe.read(LARGEST_ORDER)
    return json.loads(data) if data else {}


def first_process(confinement: Confinement, descriptors: list[int]) -> NoReturn:
    """Runs the program in a child and reports its exit code and CPU seconds in JSON."""
    arrange(descriptors)
    os.setsid()
    if sys.platform.startswith('linux'):
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 'prctl')
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1, 'prctl')
    os.write(ENTRANCE, b'0')
    order = read_order(ORDER)
    if not order:
        os._exit(0)
    limits = SandboxLimits(**order['limits'])
    folder = confinement.new_folder(limits, order['folder'])

    def program() -> None:
        os.closerange(TALK + 1 if order['tested'] else TALK, MOST_DESCRIPTORS)
        confinement.shut_in(limits, folder, is_program=True)
        run_text(order['text'], Channel(TALK) if order['tested'] else None, folder)

    number = fork(program)
    # Else the program's end would not be the end of its streams and of the tests' channel.
    arrange([os.open(os.devnull, os.O_RDWR)] * 4 + [REPORT, REPORT])
    while True:
        ended, status, usage = os.wait4(-1, 0)
        if ended == number:
            break
    facts = {'code': os.waitstatus_to_exitcode(status), 'cpu': usage.ru_utime + usage.ru_stime}
    os.write(REPORT, json.dumps(facts).encode())
    os._exit(0)


def tests_process(confinement: Confinement, descriptors: list[int]) -> NoReturn:
    """Runs the tests and reports on each in a line of JSON."""
    arrange(descriptors)
    os.setsid()
    order = read_order(ORDER)
    if not order:
        os._exit(0)
    limits = SandboxLimits(**order['limits'])
    folder = confinement.new_folder(limits, order['folder'])
    # Their own report has no need of the limits on files and output.
    confinement.shut_in(limits._replace(cpu_seconds=limits.wall_seconds), folder, is_program=False)

    def report(line: list) -> None:
        os.write(REPORT, json.dumps(line).encode() + b'\n')

    run_tests(order['tests'], Channel(TALK), report)
    os._exit(0)
