"""Executors on this machine: in this process, or in several worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from maxlm.data.executors.executor import OnProgress, Task, TaskResult, TaskStatus, run_once

# Each worker uses one thread, because the worker processes already use all cores.
ONE_THREAD = {'TOKENIZERS_PARALLELISM': 'false', 'RAYON_NUM_THREADS': '1'}

# Signals that a terminal sends to all processes of a command: Ctrl-C, and its own end.
TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})

# Seconds that an idle process has to exit.
END_SECONDS = 5.0


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


@contextlib.contextmanager
def blocked_terminal_signals() -> Iterator[None]:
    """Context whose new processes never receive signals of the terminal, because only their parent handles them.

    They inherit the blocked signals. A signal that is pending at the end of the context is delivered then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        # The first start of a process would do this, and unblock SIGINT.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class InProcess:
    """Runs tasks one at a time in the current process. See `Executor`."""

    num_slots = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Task]] = deque()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, number: int, task: Task) -> None:
        """See `Executor`."""
        self._waiting.append((number, task))

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `Executor`."""
        return [run_once(*self._waiting.popleft(), on_progress)]

    def close(self) -> None:
        """See `Executor`."""
        self._waiting.clear()


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class Processes:
    """Runs tasks in `num_slots` worker processes. Workers start on demand and exit with this process.

    If a worker is killed, its task fails in this attempt and the worker is replaced. See `Executor`.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._idle: list[_Worker] = []
        # Maps task numbers to workers.
        self._busy: dict[int, _Worker] = {}
        # The encoder's threads do not survive a fork.
        self._context = multiprocessing.get_context('spawn')

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, number: int, task: Task) -> None:
        """See `Executor`."""
        worker = self._idle.pop() if self._idle else self._new_worker()
        self._busy[number] = worker
        # `wait` reports a worker that was killed.
        with contextlib.suppress(OSError):
            worker.connection.send((number, task))

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `Executor`."""
        numbers = {worker.connection: number for number, worker in self._busy.items()}
        outcomes = []
        for connection in multiprocessing.connection.wait(list(numbers)):
            assert isinstance(connection, Connection)
            number = numbers[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                outcomes.append(self._bury(number))
                continue
            if isinstance(message, TaskResult):
                self._idle.append(self._busy.pop(number))
                outcomes.append(message)
            else:
                on_progress(*message)
        return outcomes

    def close(self) -> None:
        """See `Executor`. Kills busy workers, which is safe because files are written atomically."""
        idle, busy = self._idle, list(self._busy.values())
        self._idle, self._busy = [], {}
        for worker in busy:
            worker.process.kill()
        # Idle workers exit by themselves and clean up the resources of libraries.
        for worker in (*busy, *idle):
            worker.connection.close()
            worker.process.join(END_SECONDS)
            worker.process.kill()
            worker.process.join()

    def _new_worker(self) -> _Worker:
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=_work, args=(child_end,), daemon=True)
        with blocked_terminal_signals():
            process.start()
        # An open copy would hide the exit of the worker.
        child_end.close()
        return _Worker(process, parent_end)

    def _bury(self, number: int) -> TaskResult:
        process, connection = self._busy.pop(number)
        connection.close()
        process.join()
        code = process.exitcode or 0
        how = f'exited with code {code}'
        if code < 0:
            how = f'was killed by {signal.Signals(-code).name}'
        return TaskResult(
            number,
            TaskStatus.FAILED,
            f'its worker process {how}, possibly out of memory; use fewer --workers',
        )


def _work(connection: Connection) -> None:
    os.environ.update(ONE_THREAD)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            number, task = connection.recv()
        except EOFError:
            return
        connection.send(run_once(number, task, lambda *new: connection.send(new)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
