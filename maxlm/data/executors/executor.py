"""Tasks that any process can do, and what runs them: what fails is tried again, what is done stays done."""

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

# What no second try helps against, and every other task will meet as well.
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})

# Called with newly done (bytes of input, documents, tokens).
OnProgress = Callable[[int, int, int], None]


class TransientError(Exception):
    """A storage that fails now and may answer later. The message is one line."""


class Task(Protocol):
    """A part of the work, from files to files. Picklable; done twice it writes the same bytes."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> int:
        """Bytes of input."""

    def is_done(self) -> bool:
        """Whether its result is there, made from the same."""

    def run(self, report: OnProgress) -> None:
        """Does it; the result appears last, whole or not at all."""


class TaskStatus(enum.Enum):
    """How a task ended."""

    DONE = 'done'
    # The input or the disk is at fault, as an InputError says: all must stop.
    BAD = 'bad'
    # Anything else: another try may succeed.
    FAILED = 'failed'


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """How the task of this number ended, and why in one line."""

    number: int
    ending: TaskStatus
    reason: str = ''


class Executor(Protocol):
    """Somewhere tasks run. A context manager; leaving it ends what still runs."""

    @property
    def num_slots(self) -> int:
        """Tasks that may be started before one has ended."""

    def start(self, number: int, task: Task) -> None:
        """Starts a task, which `number` tells from the others."""

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """Waits until something happens; tells progress, returns what has ended (perhaps nothing)."""

    def close(self) -> None:
        """Ends what still runs."""


def run_with_retries(number: int, task: Task, report: OnProgress) -> TaskResult:
    """Runs a task, in whatever process, and tells how it ended."""
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
    sleep: Callable[[float], None] = time.sleep,
) -> dict[int, str]:
    """Runs all tasks. Those that fail are run again when all others have ended, after a pause, at most `retries` times.

    Args:
        engine: runs the tasks.
        tasks: in the order in which they are started.
        retries: further attempts of a task.
        on_progress: called with newly done work; for tasks that are run again, again.
        sleep: waits for a number of seconds.

    Returns:
        The last reason of each task that failed in all attempts, by its index in `tasks`.

    Raises:
        InputError: a task met bad input or a full disk. Completed tasks stay completed.
    """
    failed = dict.fromkeys(range(len(tasks)), '')

    def attempt() -> dict[int, str]:
        nonlocal failed
        failed = _run_round(engine, tasks, sorted(failed), on_progress)
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
    engine: Executor, tasks: Sequence[Task], numbers: Sequence[int], on_progress: OnProgress
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
    return failed
