"""Tests that a limited process returns results, reports the cause of each failure and never outlives its parent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from maxlm.errors import InputError
from maxlm.sandbox.limited_process import (
    LimitedProcess,
    LimitError,
    MemoryLimitError,
    OutputLimitError,
    ProcessFailedError,
    ProcessKilledError,
    ProcessLimits,
    TimeLimitError,
)
from maxlm.sandbox.process import interpreter
from tests.conftest import ROOT
from tests.waiting import until

LIMITS = ProcessLimits(
    cpu_seconds=0.2, memory_bytes=64 << 20, memory_per_byte=0, output_bytes=100, output_per_byte=2, wall_seconds=60
)
NAME = 'tests.sandbox.limited_function:answer'


@pytest.fixture
def process():
    process = LimitedProcess(NAME, LIMITS)
    yield process
    process.close()


@pytest.mark.parametrize(
    ('request_text', 'error', 'message'),
    [
        ('loop', TimeLimitError, 'takes more than 0.2 s of CPU time'),
        ('refuse the reason', InputError, 'the reason'),
        ('allocate 9000000000', MemoryLimitError, 'needs more than 64 MiB of memory'),
        ('abort', MemoryLimitError, 'needs more than 64 MiB of memory'),
        ('recurse', ProcessFailedError, 'fails: RecursionError'),
        ('exit 3', ProcessFailedError, 'ends its process with exit code 3'),
        ('x' * 100 + 'x', None, ''),
    ],
)
def test_each_cause_has_an_error_and_the_next_request_works(process, request_text, error, message):
    for _ in range(2):
        if error is None:
            assert process.call(request_text.encode()).decode() == request_text
        else:
            with pytest.raises(error) as info:
                process.call(request_text.encode())
            assert str(info.value) == message
        assert process.call(b'hello') == b'hello'


def test_limits_scale_with_the_request():
    process = LimitedProcess(NAME, LIMITS._replace(output_bytes=0))
    assert process.call(b'x' * 50) == b'x' * 50
    process.close()
    process = LimitedProcess(NAME, LIMITS._replace(output_bytes=10, output_per_byte=0))
    with pytest.raises(OutputLimitError, match='outputs 50 bytes; the limit is 10'):
        process.call(b'x' * 50)
    process.close()


def test_a_process_that_sleeps_is_stopped():
    process = LimitedProcess(NAME, LIMITS._replace(wall_seconds=0.5))
    process.call(b'started')
    with pytest.raises(TimeLimitError, match=r'takes more than 0\.5 s$'):
        process.call(b'sleep 60')
    process.close()


@pytest.mark.parametrize('inherited', ['ignored', 'blocked'])
def test_a_parent_that_ignores_the_limit_signal(inherited):
    program = f"""
import signal
from maxlm.sandbox.limited_process import LimitError, ProcessLimits, limited_process
if {inherited == 'ignored'}:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGPROF}})
try:
    limited_process({NAME!r}, ProcessLimits(cpu_seconds=0.1)).call(b'loop')
except LimitError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == 'takes more than 0.1 s of CPU time\n'


def test_an_interrupted_request_leaves_no_response(process, monkeypatch):
    """Checks that the response to an interrupted request is not returned for the next request."""
    with monkeypatch.context() as patch:
        patch.setattr('maxlm.sandbox.limited_process.receive', raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.call(b'first')
    assert process.call(b'second') == b'second'


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_a_killed_parent_leaves_no_process():
    program = f"""
import os, signal
from maxlm.sandbox.limited_process import limited_process
process = limited_process({NAME!r})
process.call(b'started')
print([*__import__('psutil').Process().children()][0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)


def test_forks_do_not_share_a_process():
    program = f"""
import os
from maxlm.sandbox.limited_process import limited_process
process = limited_process({NAME!r})
process.call(b'started')
pid = os.fork()
if pid == 0:
    other = limited_process({NAME!r})
    os._exit(int(other is process or other.call(b'child') != b'child') or process.close() or other.close() or 0)
print(os.waitpid(pid, 0)[1], process.call(b'parent'))
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "0 b'parent'\n"


def test_no_descriptor_is_kept():
    process = LimitedProcess(NAME, LIMITS)
    process.call(b'x')
    process.close()
    before = len(os.listdir('/proc/self/fd'))
    for _ in range(3):
        process.call(b'x')
        process.close()
    assert len(os.listdir('/proc/self/fd')) == before


def test_forks_share_the_state_of_their_parent():
    parent = LimitedProcess(NAME, LIMITS)
    assert parent.call(b'count') == b'1'
    forks = [parent.fork() for _ in range(3)]
    assert [fork.call(b'count') for fork in forks] == [b'2'] * 3
    assert parent.call(b'count') == b'2'
    with pytest.raises(TimeLimitError, match='CPU time'):
        forks[0].call(b'loop')
    with pytest.raises(ProcessFailedError, match='has no process'):
        forks[0].call(b'count')
    with pytest.raises(ProcessFailedError, match='exit code 3'):
        forks[1].call(b'exit 3')
    # Forks that nobody refers to end, and leave no zombie.
    assert forks[2].call(b'count') == b'3'
    host = process_of(parent)
    assert len(host.children()) == 1
    forks.clear()
    until(lambda: not host.children())
    busy = parent.fork()
    busy.send(b'sleep 60')
    assert len(host.children()) == 1
    busy.close()
    assert not host.children()
    parent.close()


def test_a_cancelled_request_kills_its_process(process):
    answers = iter([False, True])
    with pytest.raises(LimitError):
        process.call(b'sleep 60', lambda: next(answers))
    assert process.call(b'next') == b'next'


def test_forks_end_with_their_parent():
    process = LimitedProcess(NAME, LIMITS)
    fork = process.fork()
    fork.send(b'sleep 60')
    (child,) = process_of(process).children()
    process.close()
    child.wait(30)
    with pytest.raises(ProcessKilledError):
        fork.result()


def process_of(process):
    """Returns the process of a handle."""
    return psutil.Process(int(process.call(b'pid')))


def test_messages_are_exact_and_a_closed_connection_is_an_error():
    ours, other = socket.socketpair()
    with ours, other:
        interpreter.send(ours, b'Q', b'')
        interpreter.send(ours, b'R', bytes(1000))
        assert interpreter.receive(other) == (b'Q', b'')
        assert interpreter.receive(other) == (b'R', bytes(1000))
        ours.sendall(interpreter.HEADER.pack(b'Q', 5) + b'abc')
        ours.close()
        with pytest.raises(EOFError):
            interpreter.receive(other)
