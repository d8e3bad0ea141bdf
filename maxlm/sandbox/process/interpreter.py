"""Starts Python processes that serve requests on a socket, exchanges messages with them and kills them.

A message consists of its kind (one byte), its length and its data.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Header of a message: its kind and its length.
HEADER = struct.Struct('>cQ')
# Kinds of requests to a limited process, and of its responses.
REQUEST, FORK, END = b'Q', b'K', b'E'
RESULT, REFUSED, FAILED, NO_MEMORY, TOO_LONG = b'R', b'I', b'F', b'M', b'L'
# No site packages, no user directory and no directory of a script. The environment is given. Output is not buffered,
# because a fork would write what the buffers contain.
_ISOLATED = ('-s', '-S', '-P', '-B', '-u')
_BOOTSTRAP = (
    'import importlib, json, socket, sys; module, name, descriptor, path, *arguments = sys.argv[1:]; '
    'sys.path[:0] = json.loads(path); '
    'getattr(importlib.import_module(module), name)(socket.socket(fileno=int(descriptor)), *arguments)'
)
_MAX_CHUNK_BYTES = 1 << 20


def start_interpreter(
    function: str, *arguments: str, path: Sequence[str], environment: Mapping[str, str], is_trusted: bool = False
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process that calls a function with a socket, and returns the process and the other end of the socket.

    The process has its own session, so that Ctrl-C and a closed terminal do not reach it.

    Args:
        function: `module:name` of the function.
        arguments: arguments of the function after the socket.
        path: directories to search for modules before those of the standard library.
        environment: environment variables.
        is_trusted: keep the working directory, the output and the site packages of this process.

    Raises:
        OSError: the system has no more processes, descriptors or memory.
    """
    connection, other = socket.socketpair()
    module, _, name = function.partition(':')
    with other:
        try:
            flags, output, directory = ((), None, None) if is_trusted else (_ISOLATED, subprocess.DEVNULL, '/')
            words = [_BOOTSTRAP, module, name, str(other.fileno()), json.dumps(path), *arguments]
            process = subprocess.Popen(
                [sys.executable, *flags, '-c', *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[other.fileno()],
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            connection.close()
            raise
    return process, connection


def kill(process: subprocess.Popen[bytes]) -> int:
    """Kills a process and those in its session, waits for its end and returns its exit code."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def send(connection: socket.socket, kind: bytes, data: bytes) -> None:
    """Sends one message. Raises OSError."""
    connection.sendall(HEADER.pack(kind, len(data)) + data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receives the kind and the data of one message. Raises EOFError if the connection is closed, and OSError."""
    return receive_with_descriptors(connection)[:2]


def receive_with_descriptors(connection: socket.socket) -> tuple[bytes, bytes, list[int]]:
    """Receives the kind, the data and the descriptors of one message. Raises as `receive`."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, 1)
    # At the end of the connection, the rest raises EOFError.
    kind, length = HEADER.unpack(head + _read(connection, HEADER.size - len(head)))
    return kind, _read(connection, length), descriptors


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(length - len(data), _MAX_CHUNK_BYTES))
        if not chunk:
            raise EOFError('the connection is closed')
        data += chunk
    return bytes(data)
