"""Heartbeats of the processes of a run: that they live, what they wait for, and why they end.

Each writes a line a second to the store of JAX's coordination service; process 0 reads all of them and writes one
report, which the others read. So the traffic grows with the number of processes, not with its square.
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

from maxlm.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError

TICK_SECONDS = 1.0
# A process whose lines stay out for so many ticks is lost, and so is a process 0 that says nothing.
LOST_TICKS = 8
# After so many it is looked whether process 0 is there at all.
PROBE_TICKS = 2
# The first line may take longer: processes start at different speeds.
FIRST_TICKS = 60
# A report must be read by all before process 0 ends, which holds the store.
LINGER_SECONDS = 3.0
# The error that a lost peer causes in a collective is seen here before the peer is found lost.
REPORT_SECONDS = 12.0
# All processes reach the end of a run at about the same time.
END_SECONDS = 600
# Then they disconnect: sooner than the abort that `_delay_abort` holds up.
DISCONNECT_SECONDS = 4.0
# One of them may be fetching a checkpoint, while the others wait. Those that are lost are noticed long before.
BARRIER_SECONDS = 6 * 3600

LINES, REPORT, END = 'maxlm/lines', 'maxlm/verdict', 'maxlm/end'


class FailureReport(NamedTuple):
    """What process 0 makes of the lines of all. Where there is a `reason`, all end with `code`."""

    # Changes with every one: it shows that process 0 lives.
    sequence_number: int
    # Every process has waited too long for the others, so none of them is the one that is waited for.
    all_overdue: bool
    reason: str = ''
    code: int = EXIT_PREEMPTED


class Heartbeats:
    """While entered, the processes of a run end together. Does nothing for a process that is alone.

    An error in one ends the others: with exit code 2 after bad input, otherwise with 75, since starting again can help.
    """

    def __init__(self) -> None:
        self._id, self._count = jax.process_index(), jax.process_count()
        self._status = 'busy'
        self._report = FailureReport(sequence_number=0, all_overdue=self._count == 1)
        self._silent_ticks = 0
        self._sequence_number = 0
        # By process: its last line, and the ticks since that was new.
        self._lines = {number: ('', LOST_TICKS - FIRST_TICKS) for number in range(1, self._count)}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # Told the exit code and the reason before the process ends in the midst of its work, from whatever thread.
        self.on_exit: Callable[[int, str], None] = lambda code, reason: None

    @property
    def all_overdue(self) -> bool:
        """Whether all processes have said that they have waited too long for the others."""
        return self._report.all_overdue

    def set_overdue(self, is_overdue: bool) -> None:
        """Says whether this process has waited too long for the others."""
        self._status = 'overdue' if is_overdue else 'busy'

    def barrier(self, name: str) -> None:
        """Waits for all processes to come here; `name` tells this place from others."""
        if self._count > 1:
            _state().client.wait_at_barrier(f'maxlm/{name}', BARRIER_SECONDS * 1000)

    def exit_all(self, code: int, reason: str) -> NoReturn:
        """Ends this process, from any of its threads, and the others, who print the reason."""
        if self._count > 1:
            self._status = f'left {code} {reason}'
            self._stop.set()
            # If process 0 cannot be reached the others know already.
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
                # As below.
                self._stop.wait(REPORT_SECONDS)
                raise
            self._stop.set()
        elif isinstance(error, InputError):
            reason = ' '.join(str(error).split())
            print(f'error: {reason}', file=sys.stderr)
            self.exit_all(EXIT_BAD_INPUT, reason)
        elif isinstance(error, KeyboardInterrupt):
            self.exit_all(EXIT_INTERRUPTED, 'interrupted')
        else:
            # If a peer is lost that is the news, and not which collective failed by it: `_talk` will end this process.
            self._stop.wait(REPORT_SECONDS)
            traceback.print_exception(error)
            self.exit_all(EXIT_FAILED, f'{type(error).__name__}: {" ".join(str(error).split())[:200]}')

    def _exchange_loop(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                report = self._exchange()
            except RuntimeError:
                if not self._stop.is_set():
                    self._exit_with_others('process 0 is gone; start again')
                return
            self._silent_ticks = 0 if report.sequence_number != self._report.sequence_number else self._silent_ticks
            self._report = report
            if report.reason and not self._stop.is_set():
                if self._id == 0:
                    self._stop.wait(LINGER_SECONDS)
                self._exit_with_others(report.reason, report.code)

    def _watch_loop(self) -> None:
        # Counted in ticks and not by a clock, so that a process that was suspended does not take it for silence.
        while not self._stop.wait(TICK_SECONDS):
            self._silent_ticks += 1
            if self._silent_ticks >= PROBE_TICKS and self._id and _is_refused(_state().coordinator_address):
                self._exit_with_others('process 0 is gone; start again')
            if self._silent_ticks > (LOST_TICKS if self._report.sequence_number else FIRST_TICKS):
                self._exit_with_others(f'nothing heard from process 0 for {LOST_TICKS * TICK_SECONDS:g} s; start again')

    def _exit_with_others(self, reason: str, code: int = EXIT_PREEMPTED) -> NoReturn:
        print(f'[process {self._id}] ending with the others: {reason}', file=sys.stderr)
        self.on_exit(code, reason)
        _end(code)

    def _exchange(self) -> FailureReport:
        """Writes the status of this process, reads the report. Raises RuntimeError if process 0 cannot be reached."""
        store = _state().client
        # Two threads come here when a process leaves.
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
                report = FailureReport(0, False, f'process {lost[0]} is gone; start again')
            report = self._report if self._report.reason else report._replace(sequence_number=self._sequence_number)
            store.key_value_set(f'{REPORT}/0', json.dumps(report), allow_overwrite=True)
            return report


def disconnect(code: int) -> None:
    """Disconnects from the other processes after all work is done, before this process ends with `code`.

    JAX would wait for one that is lost only now until its heartbeat stays out, and then abort: a run that is done would
    seem to have failed. Here the process ends at once, with its code, if the others do not come soon.
    """
    if _state().client is not None:
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(DISCONNECT_SECONDS)
        if leaving.is_alive():
            _end(code)


def diagnose(lines: dict[int, str]) -> FailureReport:
    """Returns the report that follows from the last line of each process, by its number."""
    statuses = {number: line.partition(' ')[2] for number, line in lines.items()}
    for number, status in statuses.items():
        word, _, rest = status.partition(' ')
        if word == 'left':
            code, _, reason = rest.partition(' ')
            exit_code = EXIT_BAD_INPUT if int(code) == EXIT_BAD_INPUT else EXIT_PREEMPTED
            return FailureReport(0, False, f'process {number}: {reason}', exit_code)
    return FailureReport(0, all(status == 'overdue' for status in statuses.values()))


def _state() -> Any:
    # JAX has no public door to its coordination service and the key-value store there; Orbax takes this one too.
    from jax._src import distributed

    return distributed.global_state


def _is_refused(address: str) -> bool:
    """Returns whether nobody listens at an address; one that cannot be reached does not refuse."""
    host, _, port = address.rpartition(':')
    try:
        socket.create_connection((host.strip('[]'), int(port)), timeout=TICK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _end(code: int) -> NoReturn:
    """Ends at once: an orderly end of JAX waits for all processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _delay_abort() -> None:
    """Gives `_listen` the time to end this process in its own way.

    When process 0 is gone, a thread of JAX aborts the process at once, with a stack trace. A handler in Python could
    not hold it up, for abort ends the process as soon as the handler in C returns, and that only makes a note. The
    handler here is the C library's `sleep`, called with the signal's number: SIGABRT's is 6, so it takes 6 seconds,
    after which the process is aborted as ever. That thread holds JAX's locks meanwhile, so `_talk` may hang.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
