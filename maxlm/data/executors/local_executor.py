"""Tasks in this process, or in several others on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from maxlm.data.executors.executor import OnProgress, Task, TaskResult, TaskStatus, run_with_retries

# One thread per worker; the processes are what uses the cores.
ONE_THREAD = {'TOKENIZERS_PARALLELISM': 'false', 'RAYON_NUM_THREADS': '1'}

# Seconds that an idle process gets to end.
END_SECONDS = 5.0


class InProcess:
    """Runs one task after the other where it is. See `engine.Engine`."""

    num_slots = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Task]] = deque()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, number: int, task: Task) -> None:
        """See `engine.Engine`."""
        self._waiting.append((number, task))

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `engine.Engine`."""
        return [run_with_retries(*self._waiting.popleft(), on_progress)]

    def close(self) -> None:
        """See `engine.Engine`."""
        self._waiting.clear()


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class Processes:
    """Runs tasks in `num_slots` processes, which start when they are needed and die with this one.

    A process that is killed costs the try of its task and is replaced. See `engine.Engine`.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._idle: list[_Worker] = []
        # By the number of the task.
        self._busy: dict[int, _Worker] = {}
        # Not fork: the encoder's threads do not survive it.
        self._context = multiprocessing.get_context('spawn')

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, number: int, task: Task) -> None:
        """See `engine.Engine`."""
        worker = self._idle.pop() if self._idle else self._new_worker()
        self._busy[number] = worker
        # If it was killed meanwhile, `wait` tells.
        with contextlib.suppress(OSError):
            worker.connection.send((number, task))

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `engine.Engine`."""
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
        """See `engine.Engine`. Kills whoever is at work: what is written appears whole or not at all."""
        idle, busy = self._idle, list(self._busy.values())
        self._idle, self._busy = [], {}
        for worker in busy:
            worker.process.kill()
        # The others end by themselves, and tidy up what libraries leave.
        for worker in (*busy, *idle):
            worker.connection.close()
            worker.process.join(END_SECONDS)
            worker.process.kill()
            worker.process.join()

    def _new_worker(self) -> _Worker:
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=_work, args=(child_end,), daemon=True)
        # Ctrl-C is for this process, which ends the workers: until they ignore it they start with it blocked. One that
        # comes now is taken here a moment later.
        multiprocessing.resource_tracker.ensure_running()  # else `start` would do this, which unblocks it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Else its end would not be noticed here.
        child_end.close()
        return _Worker(process, parent_end)

    def _bury(self, number: int) -> TaskResult:
        process, connection = self._busy.pop(number)
        connection.close()
        process.join()
        code = process.exitcode or 0
        how = f'ended with exit code {code}'
        if code < 0:
            how = f'was killed by {signal.Signals(-code).name}'
        return TaskResult(
            number,
            TaskStatus.FAILED,
            f'its worker process {how}, perhaps for want of memory; fewer --workers need less',
        )


def _work(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(ONE_THREAD)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            number, task = connection.recv()
        except EOFError:
            return
        connection.send(run_with_retries(number, task, lambda *new: connection.send(new)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
