"""Serves requests in a limited process: applies a function to each, and forks on request."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from maxlm.errors import InputError
from maxlm.sandbox.process.interpreter import (
    END,
    FAILED,
    FORK,
    NO_MEMORY,
    REFUSED,
    RESULT,
    TOO_LONG,
    receive_with_descriptors,
    send,
)

# Number of exit codes of ended forks to keep until the parent process asks for them.
_KEPT_CODES = 1000
# Fields of /proc/self/statm.
ADDRESS_SPACE, RESIDENT = 0, 1


def serve(connection: socket.socket, settings: str) -> None:
    """Serves requests until the connection is closed. The kernel kills the process at its limits.

    Args:
        connection: socket of the parent process.
        settings: function and limits as JSON.
    """
    name, limits = json.loads(settings)
    # A parent process may ignore or block this signal, and a new process inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    module, _, attribute = name.partition(':')
    function = getattr(importlib.import_module(module), attribute)
    forks = _Forks()
    size = memory_bytes(ADDRESS_SPACE)
    with contextlib.suppress(EOFError, ConnectionError):
        send(connection, RESULT, b'')
        while True:
            kind, request, descriptors = receive_with_descriptors(connection)
            if kind == FORK:
                connection = forks.start(connection, descriptors[0])
                # The limits of a fork are relative to the memory of its parent.
                size = memory_bytes(ADDRESS_SPACE)
                continue
            if kind == END:
                code = forks.end(int(request))
                send(connection, RESULT, b'' if code is None else str(code).encode())
                continue
            _limit_memory(size + limits['memory_bytes'] + limits['memory_per_byte'] * len(request))
            limit_cpu(limits['cpu_seconds'])
            longest = limits['output_bytes'] + limits['output_per_byte'] * len(request)
            kind, data = _answer(function, request, longest)
            limit_cpu(0)
            _limit_memory(resource.RLIM_INFINITY)
            send(connection, kind, data)


def limit_cpu(seconds: float) -> None:
    """Limits the CPU time of this process from now on; 0 = no limit. A function may lower the limit of its request."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class _Forks:
    """Forks of a serving process, and the exit codes of those that have ended."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}

    def start(self, connection: socket.socket, descriptor: int) -> socket.socket:
        """Forks, and returns the socket to serve: in the fork the one of `descriptor`, otherwise `connection`."""
        signal.signal(signal.SIGCHLD, self._reap)
        try:
            process_id = os.fork()
        except OSError as error:
            os.close(descriptor)
            send(connection, FAILED, f'cannot start its process: {error}'.encode())
            return connection
        if process_id == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            return socket.socket(fileno=descriptor)
        os.close(descriptor)
        self._running.add(process_id)
        send(connection, RESULT, str(process_id).encode())
        return connection

    def end(self, process_id: int) -> int | None:
        """Kills a fork and returns its exit code."""
        if process_id in self._running:
            # This does not change the exit code of a process that is ending.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
            # The signal handler may be faster.
            with contextlib.suppress(ChildProcessError):
                self._ended(*os.waitpid(process_id, 0))
        return self._codes.pop(process_id, None)

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(*ended)

    def _ended(self, process_id: int, status: int) -> None:
        self._running.discard(process_id)
        self._codes[process_id] = os.waitstatus_to_exitcode(status)
        while len(self._codes) > _KEPT_CODES:
            del self._codes[next(iter(self._codes))]


def _answer(function: Callable[[bytes], bytes], request: bytes, longest: int) -> tuple[bytes, bytes]:
    try:
        result = function(request)
    except InputError as error:
        return REFUSED, str(error).encode(errors='replace')
    except MemoryError:
        return NO_MEMORY, b''
    except BaseException as error:
        return FAILED, f'fails: {type(error).__name__}'.encode()
    if len(result) > longest:
        return TOO_LONG, f'outputs {len(result)} bytes; the limit is {longest}'.encode()
    return RESULT, result


def memory_bytes(kind: int) -> int:
    """Returns the size of the address space (ADDRESS_SPACE) or the resident memory (RESIDENT); 0 if it is unknown."""
    with contextlib.suppress(OSError):
        return int(Path('/proc/self/statm').read_text().split()[kind]) * resource.getpagesize()
    return 0


def _limit_memory(value: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        value = hard if value == resource.RLIM_INFINITY else min(value, hard)
    # Some systems do not support this limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (value, hard))
