"""Heartbeats of the processes of a run: detects lost, failed and overdue processes and ends all processes together.

Each process writes its status to the store of JAX's coordination service once per second. Process 0 reads all statuses
and writes one report, which the other processes read. The traffic grows linearly with the number of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import jax

from maxlm.errors import (
    EXIT_BAD_INPUT,
    EXIT_DEVICE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    DeviceError,
    InputError,
    one_line,
)

TICK_SECONDS = 1.0
# A process counts as lost after this many ticks without a heartbeat, or, for process 0, without a new report.
LOST_TICKS = 8
# Ticks without a new report after which the connection to process 0 is tested.
PROBE_TICKS = 2
# Limit for the first heartbeat, which is longer because processes start at different speeds.
FIRST_TICKS = 60
# Process 0 owns the store, so it stays until all processes have read its report.
LINGER_SECONDS = 3.0
# A failed collective precedes the detection of the lost process. Wait this long for the report.
REPORT_SECONDS = 12.0
# Timeout of the barrier at the end of a run, which all processes reach at about the same time.
END_SECONDS = 600
# Timeout for disconnecting. Shorter than the delay of `_delay_abort`.
DISCONNECT_SECONDS = 4.0
# Long, because one process may fetch a checkpoint while the others wait. Lost processes are detected much earlier.
BARRIER_SECONDS = 6 * 3600

LINES, REPORT, END = 'maxlm/lines', 'maxlm/report', 'maxlm/end'


class FailureReport(NamedTuple):
    """Report of process 0 about all processes. If it has a `reason`, all processes exit with `code`.

    Attributes:
        sequence_number: changes with every report, as the heartbeat of process 0.
        all_overdue: True if every process has waited too long for the others, so that no process is known to be stuck.
        reason: reason for the exit; '' = none.
        code: exit code.
        at_fault: processes whose devices compute wrong results. They exit with EXIT_DEVICE instead of `code`.
    """

    sequence_number: int
    all_overdue: bool
    reason: str = ''
    code: int = EXIT_PREEMPTED
    at_fault: tuple[int, ...] = ()

    def code_of(self, process: int) -> int:
        """Returns the exit code of a process."""
        return EXIT_DEVICE if process in self.at_fault else self.code


class Heartbeats:
    """Context in which the processes of a run end together. Does nothing if there is only one process.

    An error in one process ends all: with exit code 2 after bad input, otherwise with 75, because a restart may help.
    After a DeviceError, the processes at fault exit with 74.
    """

    def __init__(self) -> None:
        self._id, self._count = jax.process_index(), jax.process_count()
        self._status = 'busy'
        self._report = FailureReport(sequence_number=0, all_overdue=self._count == 1)
        self._silent_ticks = 0
        self._sequence_number = 0
        # Process → its last status line, and the ticks since it changed.
        self._lines = {number: ('', LOST_TICKS - FIRST_TICKS) for number in range(1, self._count)}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # Called with exit code and reason before the process exits abnormally, from any thread.
        self.on_exit: Callable[[int, str], None] = lambda code, reason: None

    @property
    def all_overdue(self) -> bool:
        """True if all processes have reported that they waited too long for the others."""
        return self._report.all_overdue

    def set_overdue(self, is_overdue: bool) -> None:
        """Reports whether this process has waited too long for the others."""
        self._status = 'overdue' if is_overdue else 'busy'

    def barrier(self, name: str) -> None:
        """Waits for all processes. `name` identifies the barrier."""
        if self._count > 1:
            _state().client.wait_at_barrier(f'maxlm/{name}', BARRIER_SECONDS * 1000)

    def exit_all(self, code: int, reason: str, *, at_fault: tuple[int, ...] = ()) -> NoReturn:
        """Ends this process, from any of its threads, and the other processes, which print the reason.

        Args:
            code: exit code of this process.
            reason: reason for the exit.
            at_fault: processes that exit with EXIT_DEVICE; see `FailureReport`.
        """
        if self._count > 1:
            self._status = f'left {code} {",".join(map(str, at_fault)) or "-"} {reason}'
            self._stop.set()
            # If process 0 cannot be reached, the other processes detect that themselves.
            with contextlib.suppress(RuntimeError):
                self._exchange()
            if self._id == 0:
                threading.Event().wait(LINGER_SECONDS)
        self.on_exit(code, reason)
        _end(code)

    def __enter__(self) -> Heartbeats:
        if self._count > 1:
            _delay_abort()
            for target in (self._exchange_loop, self._watch_loop):
                threading.Thread(target=target, daemon=True, name=f'peers-{target.__name__}').start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._count == 1:
            return
        if error is None:
            try:
                _state().client.wait_at_barrier(END, END_SECONDS * 1000)
            except RuntimeError:
                # A lost process is reported by `_exchange_loop`, as below.
                self._stop.wait(REPORT_SECONDS)
                raise
            self._stop.set()
        elif isinstance(error, InputError):
            reason = str(error)
            print(f'error: {reason}', file=sys.stderr)
            self.exit_all(EXIT_BAD_INPUT, reason)
        elif isinstance(error, DeviceError):
            print(f'error: {error}', file=sys.stderr)
            self.exit_all(error.code_of(self._id, self._count), str(error), at_fault=error.processes)
        elif isinstance(error, KeyboardInterrupt):
            self.exit_all(EXIT_INTERRUPTED, 'interrupted')
        else:
            # If a process was lost, report that instead of the failed collective: `_exchange_loop` ends this process.
            self._stop.wait(REPORT_SECONDS)
            traceback.print_exception(error)
            self.exit_all(EXIT_FAILED, f'{type(error).__name__}: {one_line(error)[:200]}')

    def _exchange_loop(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                report = self._exchange()
            except RuntimeError:
                if not self._stop.is_set():
                    self._exit_with_others('lost contact with process 0; restart the run')
                return
            self._silent_ticks = 0 if report.sequence_number != self._report.sequence_number else self._silent_ticks
            self._report = report
            if report.reason and not self._stop.is_set():
                # An error of this process found meanwhile ends it with its own reason; see `exit_all`.
                if self._id == 0 and self._stop.wait(LINGER_SECONDS):
                    return
                self._exit_with_others(report.reason, report.code_of(self._id))

    def _watch_loop(self) -> None:
        # Counts ticks instead of seconds, so that a suspended process does not mistake its suspension for silence.
        while not self._stop.wait(TICK_SECONDS):
            self._silent_ticks += 1
            if self._silent_ticks >= PROBE_TICKS and self._id and _is_refused(_state().coordinator_address):
                self._exit_with_others('lost contact with process 0; restart the run')
            if self._silent_ticks > (LOST_TICKS if self._report.sequence_number else FIRST_TICKS):
                self._exit_with_others(
                    f'no heartbeat from process 0 for {LOST_TICKS * TICK_SECONDS:g} s; restart the run'
                )

    def _exit_with_others(self, reason: str, code: int = EXIT_PREEMPTED) -> NoReturn:
        print(f'[process {self._id}] exiting with the other processes: {reason}', file=sys.stderr)
        self.on_exit(code, reason)
        _end(code)

    def _exchange(self) -> FailureReport:
        """Writes the status of this process and reads the report. Raises RuntimeError if process 0 is unreachable."""
        store = _state().client
        # Both a leaving thread and `_exchange_loop` may call this.
        with self._lock:
            self._sequence_number += 1
            if self._id:
                store.key_value_set(
                    f'{LINES}/{self._id}', f'{self._sequence_number} {self._status}', allow_overwrite=True
                )
                for name, text in store.key_value_dir_get(REPORT):
                    assert name
                    return FailureReport(*json.loads(text))
                return FailureReport(sequence_number=0, all_overdue=False)
            for name, line in store.key_value_dir_get(LINES):
                number = int(name.rpartition('/')[2])
                before, ticks = self._lines[number]
                self._lines[number] = (line, 0 if line != before else ticks)
            self._lines = {number: (line, ticks + 1) for number, (line, ticks) in self._lines.items()}
            report = diagnose({number: line for number, (line, _) in self._lines.items()} | {0: f'0 {self._status}'})
            lost = [number for number, (_, ticks) in self._lines.items() if ticks > LOST_TICKS]
            if lost and not report.reason:
                report = FailureReport(0, False, f'lost contact with process {lost[0]}; restart the run')
            report = self._report if self._report.reason else report._replace(sequence_number=self._sequence_number)
            store.key_value_set(f'{REPORT}/0', json.dumps(report), allow_overwrite=True)
            return report


def disconnect(code: int) -> None:
    """Disconnects from the other processes after all work is done, before this process exits with `code`.

    If a process is lost at this point, JAX waits for its heartbeat timeout and aborts, so a finished run would appear
    to have failed. This function exits with `code` if the other processes do not disconnect soon.
    """
    if _state().client is not None:
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(DISCONNECT_SECONDS)
        if leaving.is_alive():
            _end(code)


def diagnose(lines: dict[int, str]) -> FailureReport:
    """Returns the report that follows from the last status line of each process."""
    statuses = {number: line.partition(' ')[2] for number, line in lines.items()}
    for number, status in statuses.items():
        state, _, rest = status.partition(' ')
        if state == 'left':
            code, listed, reason = rest.split(' ', 2)
            exit_code = EXIT_BAD_INPUT if int(code) == EXIT_BAD_INPUT else EXIT_PREEMPTED
            at_fault = () if listed == '-' else tuple(map(int, listed.split(',')))
            return FailureReport(0, False, f'process {number}: {reason}', exit_code, at_fault)
    return FailureReport(0, all(status == 'overdue' for status in statuses.values()))


def _state() -> Any:
    # JAX has no public API for its coordination service and key-value store. Orbax uses this one too.
    from jax._src import distributed

    return distributed.global_state


def _is_refused(address: str) -> bool:
    """Returns True if the connection is refused. An unreachable address returns False."""
    host, _, port = address.rpartition(':')
    try:
        socket.create_connection((host.strip('[]'), int(port)), timeout=TICK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _end(code: int) -> NoReturn:
    """Exits immediately, because a normal exit of JAX waits for all processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _delay_abort() -> None:
    """Delays JAX's abort, so that `_watch_loop` can end this process with an error message.

    When process 0 is lost, a thread of JAX aborts the process immediately with a stack trace. A Python signal handler
    cannot delay that: the C handler only sets a flag, and abort continues when it returns. This function installs the C
    library's `sleep` as the handler. It is called with the signal number, which is 6 for SIGABRT, so it sleeps for 6
    seconds before the abort. That thread holds JAX's locks during the sleep, so `_exchange_loop` may hang.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
