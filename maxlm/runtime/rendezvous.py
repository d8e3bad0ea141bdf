"""Rendezvous of the processes of a run on the coordinator's port, before JAX uses it.

After a timeout, JAX aborts a process without naming the missing ones. Here process 0 counts the processes that
connect. A process sends `maxlm NUM_PROCESSES PROCESS_ID`; the response is `go`, `late REASON` or `no REASON`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import NoReturn

from maxlm.errors import EXIT_PREEMPTED, InputError, os_message

# Environment variables of the processes of a run.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = 'MAXLM_COORDINATOR', 'MAXLM_NUM_PROCESSES', 'MAXLM_PROCESS_ID'

# Delay between two attempts to reach process 0, and timeout of `accept`.
RETRY_SECONDS = 0.2
# Timeout of a line that is normally sent immediately.
LINE_SECONDS = 2.0


class RendezvousError(Exception):
    """Not all processes of a run arrived in time. A restart may help. The message is one line."""

    def exit_process(self) -> NoReturn:
        """Exits the process from any thread, with the message and exit code 75."""
        print(f'error: {self}', file=sys.stderr, flush=True)
        os._exit(EXIT_PREEMPTED)


def rendezvous(coordinator: str, num_processes: int, process_id: int, *, seconds: float) -> None:
    """Waits until all processes have arrived. The port is free again when it returns.

    Args:
        coordinator: HOST:PORT of process 0.
        num_processes: number of processes.
        process_id: index of this process.
        seconds: timeout.

    Raises:
        InputError: the port is in use, the host cannot be found, or the settings of two processes are inconsistent.
        RendezvousError: not all processes arrived in time.
    """
    host, _, port = coordinator.rpartition(':')
    deadline = time.monotonic() + seconds
    if process_id == 0:
        _accept_all(coordinator, int(port), num_processes, deadline, seconds)
    else:
        _connect(coordinator, (host.strip('[]'), int(port)), f'maxlm {num_processes} {process_id}', deadline, seconds)


def _accept_all(coordinator: str, port: int, num_processes: int, deadline: float, seconds: float) -> None:
    """Accepts all other processes, in process 0."""
    connections: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(coordinator, port))
        while len(connections) < num_processes - 1:
            if time.monotonic() > deadline:
                missing = [str(number) for number in range(1, num_processes) if number not in connections]
                listed = ', '.join(missing[:8]) + (', …' if len(missing) > 8 else '')
                late = (
                    f'{len(connections) + 1} of {num_processes} processes connected to {coordinator} within '
                    f'{seconds:g} s; missing: {listed}; restart the run'
                )
                _answer(connections, f'late {late}')
                raise RendezvousError(late)
            with contextlib.suppress(TimeoutError):
                connection = stack.enter_context(listener.accept()[0])
                number = _accept(connection, num_processes, connections)
                if number is not None:
                    connections[number] = connection
            # A process that disconnected while it waited connects again.
            connections = {
                number: connection for number, connection in connections.items() if _is_connected(connection)
            }
        _answer(connections, 'go')


def _listen(coordinator: str, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ('', port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=1024
        )
    except OSError as error:
        raise InputError(
            f'MAXLM_COORDINATOR={coordinator}: process 0 cannot listen there ({os_message(error)}); choose a free port'
        ) from error
    listener.settimeout(RETRY_SECONDS)
    return listener


def _accept(connection: socket.socket, num_processes: int, connections: dict[int, socket.socket]) -> int | None:
    """Reads the greeting of a connection and returns its process ID, or None if it is not a process of maxlm.

    Raises:
        InputError: the process has another number of processes, or its ID is already in use.
    """
    fields = _read_line(connection).split()
    if len(fields) != 3 or fields[0] != 'maxlm' or not (fields[1] + fields[2]).isdigit():
        return None
    number = int(fields[2])
    wrong = ''
    if int(fields[1]) != num_processes:
        wrong = f'MAXLM_NUM_PROCESSES={num_processes} in process 0 but {fields[1]} in process {number}'
    elif number in connections and _is_connected(connections[number]):
        wrong = f'MAXLM_PROCESS_ID={number} is set in two processes'
    if wrong:
        message = (
            f'{wrong}; set the same MAXLM_NUM_PROCESSES in all processes, and in each a different MAXLM_PROCESS_ID '
            'below it'
        )
        _answer({**connections, -1: connection}, f'no {message}')
        raise InputError(message)
    return number


def _connect(coordinator: str, address: tuple[str, int], greeting: str, deadline: float, seconds: float) -> None:
    """Connects to process 0, in all other processes."""
    reason = 'no response'
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=LINE_SECONDS) as connection:
                connection.sendall(f'{greeting}\n'.encode())
                kind, _, message = _read_line(connection, deadline - time.monotonic() + LINE_SECONDS).partition(' ')
            reason = 'no response'
        except socket.gaierror as error:
            kind, reason = '', f'the host cannot be found: {os_message(error)}'
        except OSError as error:
            kind, reason = '', os_message(error)
        if kind == 'go':
            return
        if kind == 'no':
            raise InputError(message)
        if kind == 'late':
            raise RendezvousError(message)
        # Another program may listen on the port, such as the previous process 0 during its exit.
        time.sleep(RETRY_SECONDS)
    if reason.startswith('the host'):
        # Raised only after the timeout, because the host name may be registered later.
        raise InputError(f'MAXLM_COORDINATOR={coordinator}: {reason}; set it to the address of process 0')
    raise RendezvousError(
        f'process 0 did not respond at {coordinator} within {seconds:g} s ({reason}); restart the run'
    )


def _answer(connections: dict[int, socket.socket], line: str) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(f'{line}\n'.encode())


def _is_connected(connection: socket.socket) -> bool:
    """Returns True if the process is still connected: it has neither closed the connection nor sent more data."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b''
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(LINE_SECONDS)


def _read_line(connection: socket.socket, seconds: float = LINE_SECONDS) -> str:
    """Reads one line of at most 500 characters. After a timeout, returns the characters that arrived."""
    deadline = time.monotonic() + seconds
    line = b''
    with contextlib.suppress(OSError):
        while not line.endswith(b'\n') and len(line) < 500:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            byte = connection.recv(1)
            if not byte:
                break
            line += byte
    return line.decode(errors='replace').strip()
