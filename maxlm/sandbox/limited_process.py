"""Processes that apply trusted functions to untrusted input, with limits of time, memory and output.

Input can make a library run forever or exhaust the memory, e.g. a chat template with nested loops. The kernel kills
such a process, and the next request starts another one. Untrusted programs need `maxlm.sandbox.pool` instead.

    def count(request: bytes) -> bytes:  # In module m. An InputError reaches the caller.
        return str(len(request)).encode()

    limited_process('m:count').ask(b'abc')  # b'3'
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import maxlm
from maxlm.errors import InputError

# Header of a message: its kind and its length.
HEADER = struct.Struct('>cQ')
# No site packages, no user directory and no directory of a script. The environment is given.
_PYTHON = (sys.executable, '-s', '-S', '-P', '-B', '-c')
_BOOTSTRAP = (
    'import importlib, json, socket, sys; module, name, descriptor, path, *arguments = sys.argv[1:]; '
    'sys.path[:0] = json.loads(path); '
    'getattr(importlib.import_module(module), name)(socket.socket(fileno=int(descriptor)), *arguments)'
)
_MAX_CHUNK_BYTES = 1 << 20
# Kinds of messages.
_REQUEST, _RESULT, _REFUSED, _FAILED, _NO_MEMORY, _TOO_LONG = b'Q', b'R', b'I', b'F', b'M', b'L'
# One thread, so that a process uses one core at most. PYTHONHASHSEED is not set, so that nobody knows the hashes.
_ENVIRONMENT = {'LANG': 'C.UTF-8', 'RAYON_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
_MIB = 1 << 20
# Time for a process that closed its socket to exit.
_EXIT_SECONDS = 1.0
_START_SECONDS = 60.0


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


class LimitedProcess:
    """Handle of a process that starts at the first request, and again after it was killed. Thread-safe."""

    def __init__(self, function: str, limits: ProcessLimits | None = None, *, nice: int = 0):
        """Initializes the handle.

        Args:
            function: `module:name` of a function of this package that converts a request to a result.
            limits: limits of one request; None = the default.
            nice: niceness of the process.
        """
        self._function, self._limits, self._nice = function, limits or ProcessLimits(), nice
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        atexit.register(self.close)

    def ask(self, request: bytes) -> bytes:
        """Returns the result of a request.

        Raises:
            InputError: the function raised it.
            LimitError: the request exceeded a limit, see its subclasses.
        """
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.settimeout(self._limits.timeout)
                send(connection, _REQUEST, request)
                kind, data = receive(connection)
            except TimeoutError:
                self.close()
                raise TimeLimitError(f'takes more than {self._limits.timeout:g} s') from None
            except (OSError, EOFError):
                raise self._reason(len(request)) from None
            except BaseException:
                # The response would be read as the response to the next request.
                self.close()
                raise
        if kind != _RESULT:
            raise self._error(kind, data.decode(errors='replace'), len(request))
        return data

    def close(self) -> None:
        """Kills the process."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        # A forked copy must not kill the process.
        if process is not None and self._owner == os.getpid():
            kill(process)

    def _start(self) -> socket.socket:
        settings = json.dumps([self._function, self._limits, self._nice])
        path = [str(Path(maxlm.__file__).parents[1]), *(os.path.abspath(folder) for folder in sys.path if folder)]
        self._process, connection = start_interpreter(
            f'{__name__}:serve', settings, path=path, environment=_ENVIRONMENT
        )
        self._connection = connection
        connection.settimeout(_START_SECONDS)
        try:
            receive(connection)
        except BaseException as error:
            self.close()
            if not isinstance(error, (OSError, EOFError)):
                raise
            raise ProcessFailedError(f'cannot start its process: {error}') from None
        return connection

    def _reason(self, size: int) -> LimitError:
        """Returns the reason for a missing response, and kills the process."""
        assert self._process is not None
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
        self.close()
        if process.returncode == -signal.SIGPROF:
            return TimeLimitError(f'takes more than {self._limits.cpu_seconds:g} s of CPU time')
        # Libraries in Rust and C++ abort if they cannot allocate memory.
        if process.returncode == -signal.SIGABRT:
            return self._memory_error(size)
        return ProcessFailedError(f'ends its process with exit code {process.returncode}')

    def _error(self, kind: bytes, message: str, size: int) -> Exception:
        if kind == _REFUSED:
            return InputError(message)
        if kind == _NO_MEMORY:
            return self._memory_error(size)
        return OutputLimitError(message) if kind == _TOO_LONG else ProcessFailedError(message)

    def _memory_error(self, size: int) -> MemoryLimitError:
        limit = self._limits.memory_bytes + self._limits.memory_per_byte * size
        return MemoryLimitError(f'needs more than {limit // _MIB} MiB of memory')


def limited_process(function: str, limits: ProcessLimits | None = None, *, nice: int = 0) -> LimitedProcess:
    """Returns the handle for a function, which is shared in this process. Forks do not share it. See LimitedProcess."""
    return _shared(os.getpid(), function, limits, nice)


@functools.lru_cache
def _shared(process_id: int, function: str, limits: ProcessLimits | None, nice: int) -> LimitedProcess:
    return LimitedProcess(function, limits, nice=nice)


def serve(connection: socket.socket, settings: str) -> None:
    """Serves requests until the connection is closed. The kernel kills the process at its limits.

    Args:
        connection: socket of the parent process.
        settings: function, limits and niceness as JSON.
    """
    name, values, nice = json.loads(settings)
    limits = ProcessLimits(*values)
    # A parent process may ignore or block this signal, and a new process inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    os.nice(nice)
    module, _, attribute = name.partition(':')
    function = getattr(importlib.import_module(module), attribute)
    size = _address_space()
    with contextlib.suppress(EOFError, ConnectionError):
        send(connection, _RESULT, b'')
        while True:
            _, request = receive(connection)
            _limit_memory(size + limits.memory_bytes + limits.memory_per_byte * len(request))
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
            kind, data = _answer(function, request, limits.output_bytes + limits.output_per_byte * len(request))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _limit_memory(resource.RLIM_INFINITY)
            send(connection, kind, data)


def _answer(function: Callable[[bytes], bytes], request: bytes, longest: int) -> tuple[bytes, bytes]:
    try:
        result = function(request)
    except InputError as error:
        return _REFUSED, str(error).encode(errors='replace')
    except MemoryError:
        return _NO_MEMORY, b''
    except BaseException as error:
        return _FAILED, f'fails: {type(error).__name__}'.encode()
    if len(result) > longest:
        return _TOO_LONG, f'outputs {len(result)} bytes; the limit is {longest}'.encode()
    return _RESULT, result


def _address_space() -> int:
    """Returns the size of the address space in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        return int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    return 0


def _limit_memory(value: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        value = hard if value == resource.RLIM_INFINITY else min(value, hard)
    # Some systems do not support this limit.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (value, hard))


def start_interpreter(
    function: str, *arguments: str, path: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process that calls a function with a socket, and returns the process and the other end of the socket.

    The process has its own session, so that Ctrl-C and a closed terminal do not reach it.

    Args:
        function: `module:name` of the function.
        arguments: arguments of the function after the socket.
        path: directories to search for modules before those of the standard library.
        environment: environment variables.
    """
    connection, other = socket.socketpair()
    module, _, name = function.partition(':')
    with other:
        process = subprocess.Popen(
            [*_PYTHON, _BOOTSTRAP, module, name, str(other.fileno()), json.dumps(path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env=dict(environment),
            cwd='/',
            start_new_session=True,
        )
    return process, connection


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and those in its session, and waits for its end."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def send(connection: socket.socket, kind: bytes, data: bytes) -> None:
    """Sends one message. Raises OSError."""
    connection.sendall(HEADER.pack(kind, len(data)) + data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receives the kind and the data of one message. Raises EOFError if the connection is closed, and OSError."""
    kind, length = HEADER.unpack(_read(connection, HEADER.size))
    return kind, _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(length - len(data), _MAX_CHUNK_BYTES))
        if not chunk:
            raise EOFError('the connection is closed')
        data += chunk
    return bytes(data)
