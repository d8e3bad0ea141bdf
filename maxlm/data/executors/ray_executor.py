"""Executor on a Ray cluster. Its machines share the disk with the data set, or have a bucket in common."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from maxlm.data.executors.executor import OnProgress, Task, TaskResult, TaskStatus, run_once
from maxlm.data.executors.local_executor import ONE_THREAD, InProcess, Processes
from maxlm.errors import InputError, os_message
from maxlm.installation import pip_install

# Number of submitted tasks per core, so that no machine waits for its next task.
TASKS_PER_CORE = 2
# Number of machines that a task may lose without a failed attempt. More losses may be its own fault.
MAX_LOST_NODES = 10
# Seconds to wait for canceled tasks to stop.
CANCEL_SECONDS = 30.0
# Timeout of the connection to a cluster.
CONNECT_SECONDS = 10.0
REMEDY = 'start one with `ray start --head`, which prints its address'


class RayCluster:
    """Runs one task per core of a Ray cluster. See `Executor`.

    Ray's own retries are off, because `run_tasks` retries. A task whose machine is lost starts again at once. This
    does not count as a failed attempt. Progress is reported when a task finishes.
    """

    def __init__(self, address: str = ''):
        """Connects to a cluster.

        Args:
            address: address of the cluster. If empty, Ray uses RAY_ADDRESS or starts a cluster on this machine.

        Raises:
            InputError: Ray is not installed, or the cluster does not respond.
        """
        try:
            import ray  # an extra, and slow to import
        except ImportError as error:
            raise InputError(f'--executor=ray needs ray: {pip_install("ray")}') from error
        _refuse_silent(address)
        self._ray = ray
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR)
        # Ray, the network and the address raise exceptions of many types.
        except Exception as error:
            reason = ' '.join(str(error).split())[:300]
            raise InputError(f'--ray-address={address}: no Ray cluster ({reason}); {REMEDY}') from error
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_attempt)
        # Maps references to the number of a task, the task, and the number of machines that it has lost.
        self._running: dict[Any, tuple[int, Task, int]] = {}

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """See `Executor`. The size of a cluster can change."""
        return TASKS_PER_CORE * max(int(self._ray.cluster_resources().get('CPU', 1)), 1)

    def start(self, number: int, task: Task) -> None:
        """See `Executor`."""
        self._running[self._remote.remote(number, task)] = (number, task, 0)

    def wait(self, on_progress: OnProgress) -> list[TaskResult]:
        """See `Executor`."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        outcomes = []
        for reference in ended:
            number, task, losses = self._running.pop(reference)
            try:
                outcome, done = self._ray.get(reference)
            # A worker was lost, or ran out of memory, or a machine was lost.
            except self._ray.exceptions.RayError as error:
                if isinstance(error, self._ray.exceptions.NodeDiedError) and losses < MAX_LOST_NODES:
                    self._running[self._remote.remote(number, task)] = (number, task, losses + 1)
                    continue
                reason = str(error).strip().partition('\n')[0][:300]
                outcomes.append(TaskResult(number, TaskStatus.FAILED, f'{type(error).__name__}: {reason}'))
                continue
            on_progress(*done)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """See `Executor`."""
        running, self._running = list(self._running), {}
        for reference in running:
            self._ray.cancel(reference, force=True)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)
        if self._joined:
            self._ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raises InputError if HOST:PORT does not respond. Ray itself would retry for minutes."""
    host, _, port = address.removeprefix('ray://').rpartition(':')
    # Ray resolves other forms of addresses.
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

    outcome = run_once(number, task, report)
    num_bytes, documents, tokens = done
    return outcome, (num_bytes, documents, tokens)


def make_executor(kind: str, num_workers: int, ray_address: str) -> InProcess | Processes | RayCluster:
    """Returns the executor of `kind`, `local` or `ray`. A local executor with one worker starts no processes."""
    if kind == 'ray':
        return RayCluster(ray_address)
    return Processes(num_workers) if num_workers > 1 else InProcess()
