"""Tasks of `maxlm prepare` and the protocol of executors. Failed tasks are retried; completed tasks are kept."""

from __future__ import annotations

import dataclasses
import enum
import errno
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import tenacity

from maxlm.errors import InputError, os_message
from maxlm.storage.retry import EXPONENTIAL_BACKOFF

# Errors that a retry cannot fix and that every other task would meet too.
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})

# Called with newly completed work: (bytes of input, documents, tokens).
OnProgress = Callable[[int, int, int], None]


class TransientError(Exception):
    """A storage failure that a retry may fix. The message is one line."""


class Task(Protocol):
    """A unit of work that reads and writes files. Tasks are picklable and idempotent: a rerun writes the same bytes."""

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def size(self) -> int:
        """Size of the input in bytes."""

    def run(self, report: OnProgress) -> None:
        """Runs the task. The result is written last and atomically."""


class TaskStatus(enum.Enum):
    """Status of a finished task.

    Attributes:
        DONE: the task succeeded.
        BAD: the input or the disk has an error, reported as an InputError. All tasks must stop.
        FAILED: the task failed with another error. A retry may succeed.
    """

    DONE = 'done'
    BAD = 'bad'
    FAILED = 'failed'


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Result of one attempt to run a task.

    Attributes:
        number: number of the task.
        ending: status of the task.
        reason: cause of a failure in one line; '' for success.
    """

    number: int
    ending: TaskStatus
    reason: str = ''


class Executor(Protocol):
    """Runs tasks. An executor is a context manager, which stops running tasks when it exits."""

    @property
    def num_slots(self) -> int:
        """Maximum number of tasks that may run or wait at the same time."""

    def start(self, number: int, task: Task) -> None:
        """Starts a task, which `number` identifies."""

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """Waits for the next event, reports progress and returns the finished tasks. The list may be empty."""

    def close(self) -> None:
        """Stops all running tasks."""


def run_once(number: int, task: Task, report: OnProgress) -> TaskResult:
    """Runs a task once and returns its status. Converts exceptions to results."""
    try:
        task.run(report)
    except (InputError, TransientError) as error:
        return TaskResult(number, TaskStatus.BAD if isinstance(error, InputError) else TaskStatus.FAILED, str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return TaskResult(number, TaskStatus.BAD, f'{error.filename or task.name}: {os_message(error)}')
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f'{Path(place.filename).name}:{place.lineno}'
        return TaskResult(number, TaskStatus.FAILED, f'{type(error).__name__}: {error} ({where})')
    return TaskResult(number, TaskStatus.DONE)


def run_tasks(
    engine: Executor,
    tasks: Sequence[Task],
    *,
    retries: int,
    on_progress: OnProgress,
    on_done: Callable[[int], None] = lambda number: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[int, str]:
    """Runs all tasks. Failed tasks are retried after all others have finished and a pause, at most `retries` times.

    Args:
        engine: the executor.
        tasks: the tasks in the order in which they start.
        retries: maximum number of retries of a task.
        on_progress: called with newly completed work. A retried task reports its work again.
        on_done: called with the index of each task that succeeds.
        sleep: waits for a number of seconds.

    Returns:
        The last reason of each task that failed in all attempts, by its index in `tasks`.

    Raises:
        InputError: a task met bad input or a full disk. Completed tasks are kept.
    """
    failed = dict.fromkeys(range(len(tasks)), '')

    def attempt() -> dict[int, str]:
        nonlocal failed
        failed = _run_round(engine, tasks, sorted(failed), on_progress, on_done)
        return failed

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(bool),
        wait=EXPONENTIAL_BACKOFF,
        stop=tenacity.stop_after_attempt(retries + 1),
        sleep=sleep,
        retry_error_callback=lambda state: failed,
    )
    return retrying(attempt)


def _run_round(
    engine: Executor,
    tasks: Sequence[Task],
    numbers: Sequence[int],
    on_progress: OnProgress,
    on_done: Callable[[int], None],
) -> dict[int, str]:
    waiting, running = deque(numbers), 0
    failed: dict[int, str] = {}
    while waiting or running:
        while waiting and running < engine.num_slots:
            number = waiting.popleft()
            engine.start(number, tasks[number])
            running += 1
        for outcome in engine.wait(on_progress):
            running -= 1
            if outcome.ending is TaskStatus.BAD:
                raise InputError(outcome.reason)
            if outcome.ending is TaskStatus.FAILED:
                failed[outcome.number] = outcome.reason
            else:
                on_done(outcome.number)
    return failed
