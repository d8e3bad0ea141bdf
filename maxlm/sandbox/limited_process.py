"""Processes that apply trusted functions to untrusted input, with limits of time, memory and output.

Input can make a library run forever or exhaust the memory, e.g. a chat template with nested loops. The kernel kills
such a process, and the next request starts another one. Untrusted programs need `maxlm.sandbox.pool` instead.

    def count(request: bytes) -> bytes:  # In module m. An InputError reaches the caller.
        return str(len(request)).encode()

    limited_process('m:count').call(b'abc')  # b'3'
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import maxlm
from maxlm.errors import InputError
from maxlm.sandbox.process.interpreter import (
    END,
    FAILED,
    FORK,
    HEADER,
    NO_MEMORY,
    REFUSED,
    REQUEST,
    RESULT,
    TOO_LONG,
    kill,
    receive,
    send,
    start_interpreter,
)

_SERVER = 'maxlm.sandbox.process.server:serve'
# One thread, so that a process uses one core at most. PYTHONHASHSEED is not set, so that nobody knows the hashes.
_ENVIRONMENT = {'LANG': 'C.UTF-8', 'RAYON_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
_MIB = 1 << 20
# Time for a process that closed its socket to exit.
_EXIT_SECONDS = 1.0
_START_SECONDS = 60.0
# Interval between two checks for a cancelled request.
_POLL_SECONDS = 0.1


class ProcessLimits(NamedTuple):
    """Limits of one request.

    Attributes:
        cpu_seconds: CPU time.
        memory_bytes: address space, in addition to that of the process at its start.
        memory_per_byte: additional address space per byte of the request.
        output_bytes: size of the result.
        output_per_byte: additional size of the result per byte of the request.
        wall_seconds: timeout, which applies even if the process uses little CPU time; None = 30 + 5 · cpu_seconds.
    """

    cpu_seconds: float = 20.0
    memory_bytes: int = 512 * _MIB
    memory_per_byte: int = 64
    output_bytes: int = 16 * _MIB
    output_per_byte: int = 16
    wall_seconds: float | None = None

    @property
    def timeout(self) -> float:
        """Timeout in seconds."""
        return 30 + 5 * self.cpu_seconds if self.wall_seconds is None else self.wall_seconds


class LimitError(Exception):
    """A request exceeded a limit. The message continues a sentence: `takes more than 5 s of CPU time`."""


class TimeLimitError(LimitError):
    """The request took too much CPU time or too long."""


class MemoryLimitError(LimitError):
    """The request needed too much memory."""


class OutputLimitError(LimitError):
    """The result was too long."""


class ProcessFailedError(LimitError):
    """The function raised an exception other than InputError, or its process crashed."""


class ProcessKilledError(LimitError):
    """The process was killed from outside, e.g. because the machine has no memory left."""


class RequestCancelledError(LimitError):
    """The caller of a request does not need its result any more."""


class _Running:
    """A running process, if any: the socket, and a function that waits for its end, kills it and returns its code."""

    def __init__(
        self, connection: socket.socket | None = None, end_process: Callable[[float], int | None] = lambda seconds: None
    ):
        self.connection, self.end_process = connection, end_process
        self._owner = os.getpid()

    def end(self, seconds: float = 0.0) -> int | None:
        """Closes the socket, waits for the end of the process, kills it and returns its exit code."""
        connection, self.connection = self.connection, None
        if connection is None:
            return None
        connection.close()
        # A forked copy must not kill the process.
        return self.end_process(seconds) if self._owner == os.getpid() else None


class LimitedProcess:
    """Handle of a process that starts at the first request, and again after it was killed.

    `call` is thread-safe. One thread at a time may use `send` and `result` instead.
    """

    def __init__(self, function: str, limits: ProcessLimits | None = None):
        """Initializes the handle.

        Args:
            function: `module:name` of a function of this package that converts a request to a result.
            limits: limits of one request; None = the default.
        """
        self._limits = limits or ProcessLimits()
        self._settings = json.dumps([function, self._limits._asdict()])
        self._lock = threading.Lock()
        self._is_fork = False
        self._request_bytes = 0
        self._running = _Running()
        weakref.finalize(self, self._running.end)

    @property
    def is_running(self) -> bool:
        """True if the process has started and has not been killed."""
        return self._running.connection is not None

    def call(self, request: bytes, is_cancelled: Callable[[], bool] | None = None) -> bytes:
        """Returns the result of a request.

        Args:
            request: argument of the function.
            is_cancelled: called several times per second. If it returns True, the process is killed.

        Raises:
            InputError: the function raised it.
            LimitError: the request exceeded a limit, see its subclasses.
        """
        with self._lock:
            self.send(request)
            return self.result(is_cancelled)

    def send(self, request: bytes) -> None:
        """Sends a request, whose result `result` returns. Raises LimitError."""
        connection = self._running.connection or self._start()
        self._request_bytes = len(request)
        with self._checked():
            connection.settimeout(self._limits.timeout)
            send(connection, REQUEST, request)

    def result(self, is_cancelled: Callable[[], bool] | None = None) -> bytes:
        """Waits for the result of the earliest request without one. Raises as `call`."""
        with self._checked():
            deadline = time.monotonic() + self._limits.timeout
            while is_cancelled is not None and not self.has_result(_POLL_SECONDS):
                if is_cancelled():
                    raise RequestCancelledError
                if time.monotonic() > deadline:
                    raise TimeoutError
            kind, data = receive(self._connection)
        if kind != RESULT:
            raise self._error(kind, data.decode(errors='replace'))
        return data

    def has_result(self, seconds: float = 0.0) -> bool:
        """Waits up to `seconds` for a result, and returns True if there is one or if the process has ended."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def fileno(self) -> int:
        """Returns the descriptor of the socket, which is readable if there is a result."""
        return self._connection.fileno()

    def fork(self) -> LimitedProcess:
        """Returns the handle of a copy of the process with its current state. It does not start again if it is killed.

        Raises:
            LimitError: the process cannot be copied.
        """
        fork = LimitedProcess.__new__(LimitedProcess)
        fork._settings, fork._limits, fork._lock, fork._is_fork = self._settings, self._limits, threading.Lock(), True
        fork._request_bytes = 0
        with _checked_start():
            connection, other = socket.socketpair()
        with self._lock, other:
            try:
                ours = self._running.connection or self._start()
                with self._checked():
                    ours.settimeout(self._limits.timeout)
                    socket.send_fds(ours, [HEADER.pack(FORK, 0)], [other.fileno()])
                    kind, data = receive(ours)
                if kind != RESULT:
                    raise self._error(kind, data.decode(errors='replace'))
            except BaseException:
                connection.close()
                raise
        fork._running = _Running(connection, functools.partial(self._end_fork, data))
        # Without its socket, an idle fork ends by itself. This may run in any thread, so it must not wait.
        weakref.finalize(fork, connection.close)
        return fork

    def close(self) -> None:
        """Kills the process."""
        self._running.end()

    @property
    def _connection(self) -> socket.socket:
        connection = self._running.connection
        if connection is None:
            raise ProcessFailedError('has no process')
        return connection

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Kills the process after a failed exchange and raises the reason."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise TimeLimitError(f'takes more than {self._limits.timeout:g} s') from None
        except (OSError, EOFError):
            code = self._running.end(_EXIT_SECONDS)
            if code == -signal.SIGPROF:
                raise TimeLimitError(f'takes more than {self._limits.cpu_seconds:g} s of CPU time') from None
            if code in (None, -signal.SIGKILL):
                raise ProcessKilledError('was killed') from None
            # Libraries in Rust and C++ abort if they cannot allocate memory.
            kind = NO_MEMORY if code == -signal.SIGABRT else FAILED
            raise self._error(kind, f'ends its process with exit code {code}') from None
        except BaseException:
            # The response would be read as the response to the next request.
            self.close()
            raise

    def _start(self) -> socket.socket:
        if self._is_fork:
            raise ProcessFailedError('has no process')
        path = [str(Path(maxlm.__file__).parents[1]), *(os.path.abspath(folder) for folder in sys.path if folder)]
        with _checked_start():
            process, connection = start_interpreter(_SERVER, self._settings, path=path, environment=_ENVIRONMENT)

        def end(seconds: float) -> int:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return kill(process)

        self._running.connection, self._running.end_process = connection, end
        connection.settimeout(_START_SECONDS)
        try:
            with _checked_start():
                receive(connection)
        except BaseException:
            self.close()
            raise
        return connection

    def _end_fork(self, process_id: bytes, seconds: float) -> int | None:
        """Kills a fork and returns its exit code; None if this process has ended too."""
        del seconds
        with self._lock, contextlib.suppress(OSError, EOFError):
            if (connection := self._running.connection) is not None:
                connection.settimeout(_START_SECONDS)
                send(connection, END, process_id)
                code = receive(connection)[1]
                return int(code) if code else None
        return None

    def _error(self, kind: bytes, message: str) -> Exception:
        if kind == REFUSED:
            return InputError(message)
        if kind == NO_MEMORY:
            limit = self._limits.memory_bytes + self._limits.memory_per_byte * self._request_bytes
            return MemoryLimitError(f'needs more than {limit // _MIB} MiB of memory')
        return OutputLimitError(message) if kind == TOO_LONG else ProcessFailedError(message)


def limited_process(function: str, limits: ProcessLimits | None = None) -> LimitedProcess:
    """Returns the handle for a function, which is shared in this process. Forks do not share it. See LimitedProcess."""
    return _shared(os.getpid(), function, limits)


@contextlib.contextmanager
def _checked_start() -> Iterator[None]:
    """Raises ProcessFailedError if the system has no more processes, descriptors or memory."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise ProcessFailedError(f'cannot start its process: {error}') from None


@functools.lru_cache
def _shared(process_id: int, function: str, limits: ProcessLimits | None) -> LimitedProcess:
    return LimitedProcess(function, limits)
