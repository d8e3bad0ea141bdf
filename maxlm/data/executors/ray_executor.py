"""Tasks on the machines of a Ray cluster. The directory of the data set must be on a disk that all of them share."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from maxlm.data.executors.executor import OnProgress, Task, TaskResult, TaskStatus, run_with_retries
from maxlm.data.executors.local_executor import ONE_THREAD, InProcess, Processes
from maxlm.errors import InputError, os_message

# Tasks per core that are handed over before one has ended, so that no machine waits for the next.
TASKS_PER_CORE = 2
# Seconds that killed tasks get to end.
CANCEL_SECONDS = 30.0
# Seconds that a cluster gets to answer at all.
CONNECT_SECONDS = 10.0
REMEDY = '`ray start --head` starts one and tells its address'


class RayCluster:
    """Runs one task per core of a cluster. See `engine.Engine`.

    Ray's own retries are off: ours count. Progress is told by whole tasks.
    """

    def __init__(self, address: str = ''):
        """Joins the cluster at `address`; without one that of the variable RAY_ADDRESS, or one on this machine alone.

        Raises:
            InputError: Ray is missing, or the cluster does not answer.
        """
        try:
            import ray  # an extra, and slow to import
        except ImportError as error:
            raise InputError("--executor=ray needs ray: pip install 'maxlm[ray]'") from error
        _refuse_silent(address)
        self._ray = ray
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR)
        # Of Ray, of the network, of the address.
        except Exception as error:
            reason = ' '.join(str(error).split())[:300]
            raise InputError(f'--ray-address={address}: no Ray cluster ({reason}); {REMEDY}') from error
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_attempt)
        self._running: dict[Any, int] = {}

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """See `engine.Engine`. A cluster grows and shrinks."""
        return TASKS_PER_CORE * max(int(self._ray.cluster_resources().get('CPU', 1)), 1)

    def start(self, number: int, task: Task) -> None:
        """See `engine.Engine`."""
        self._running[self._remote.remote(number, task)] = number

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `engine.Engine`."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        outcomes = []
        for reference in ended:
            number = self._running.pop(reference)
            try:
                outcome, done = self._ray.get(reference)
            # A worker or a machine is gone, or has no memory left.
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().partition('\n')[0][:300]
                outcomes.append(TaskResult(number, TaskStatus.FAILED, f'{type(error).__name__}: {reason}'))
                continue
            on_progress(*done)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """See `engine.Engine`."""
        running, self._running = list(self._running), {}
        for reference in running:
            self._ray.cancel(reference, force=True)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)
        if self._joined:
            self._ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raises InputError when nobody answers at HOST:PORT, for which Ray would try for minutes."""
    host, _, port = address.removeprefix('ray://').rpartition(':')
    # Else it is the name of a way to find one, which Ray knows.
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = os_message(error) if isinstance(error, OSError) else str(error)
        raise InputError(f'--ray-address={address}: no Ray cluster ({reason}); {REMEDY}') from error


def _attempt(number: int, task: Task) -> tuple[TaskResult, tuple[int, int, int]]:
    os.environ.update(ONE_THREAD)
    done = [0, 0, 0]

    def report(*new: int) -> None:
        done[:] = map(sum, zip(done, new, strict=True))

    outcome = run_with_retries(number, task, report)
    num_bytes, documents, tokens = done
    return outcome, (num_bytes, documents, tokens)


def make_executor(kind: str, num_workers: int, ray_address: str) -> InProcess | Processes | RayCluster:
    """Returns the executor of `kind`, `local` or `ray`; a local one needs no processes for one worker."""
    if kind == 'ray':
        return RayCluster(ray_address)
    return Processes(num_workers) if num_workers > 1 else InProcess()
