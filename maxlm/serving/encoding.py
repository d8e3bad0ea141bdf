"""Threads that parse and tokenize requests, so that a long text does not delay other requests."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from maxlm.data.tokenizer.limited_encoding import limit_encoding
from maxlm.serving.limits import ServerLimits
from maxlm.serving.schema.errors import SERVER, ApiError
from maxlm.storage.errors import catch_panics

# Maximum size of a small body. Small bodies do not wait for larger ones.
_SMALL_BODY_BYTES = 64 * 1024
# Number of threads for small and for large bodies.
_NUM_SMALL_THREADS, _NUM_LARGE_THREADS = 2, 1
# The server is degraded if all threads of a queue work on one request each for longer than this.
STUCK_SECONDS = 120.0


class Job:
    """A function to call in a thread, and the future of its result in the event loop."""

    def __init__(self, function: Callable[[], Any], release: Callable[[], None]):
        self.function, self.release = function, release
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Calls the function in a worker thread. The result is dropped if the request was cancelled."""
        result, error = None, None
        try:
            with catch_panics('tokenizers'), limit_encoding():
                result = self.function()
        except BaseException as raised:
            error = raised
        # The event loop may be closed.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._finish, result, error)

    def fail(self, error: Exception) -> None:
        """Fails the future with an error."""
        if not self.future.done():
            self.future.set_exception(error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self.release()
        if not self.future.done():
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class WorkQueue:
    """A job queue with its own daemon threads, which do not block process exit."""

    def __init__(self, name: str, num_threads: int):
        self._jobs: collections.deque[Job] = collections.deque()
        self._condition = threading.Condition()
        self._is_closed = False
        # Start times of the jobs that are running now.
        self._started: list[float] = []
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not started."""
        return len(self._jobs)

    @property
    def busy_seconds(self) -> float:
        """Time since which all threads have been working on their current job, in seconds; 0 if one is idle."""
        started = list(self._started)
        return time.monotonic() - max(started) if len(started) == self._num_threads else 0.0

    def put(self, job: Job, max_jobs: int) -> bool:
        """Adds a job and returns True, or returns False if `max_jobs` jobs are waiting."""
        with self._condition:
            if len(self._jobs) >= max_jobs:
                return False
            self._jobs.append(job)
            self._condition.notify()
        return True

    def remove(self, job: Job) -> None:
        """Removes a job that has not started."""
        with self._condition:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        job.release()

    def close(self) -> None:
        """Stops the threads after their current jobs."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._jobs.popleft()
            started = time.monotonic()
            self._started.append(started)
            job.run()
            self._started.remove(started)
            # Release the body now instead of when the next job arrives.
            del job


class Encoders:
    """Encodes requests in four queues, by body size (small, large) and kind (text, chat).

    Small texts therefore never wait for large texts or slow chat templates.
    """

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self._queues = {
            (chat, small): WorkQueue(
                f'encode-{"chat" if chat else "text"}-{"small" if small else "large"}',
                _NUM_SMALL_THREADS if small else _NUM_LARGE_THREADS,
            )
            for chat in (False, True)
            for small in (False, True)
        }
        self._jobs: set[Job] = set()

    async def run(
        self,
        function: Callable[[], Any],
        *,
        chat: bool,
        size: int,
        receive: Receive,
        started: float,
        release: Callable[[], None],
    ) -> Any:
        """Calls a function in a worker thread and returns its result.

        Args:
            function: function that parses and tokenizes the request.
            chat: the request uses a chat template.
            size: size of the body in bytes.
            receive: ASGI receive channel of the request, whose body has been read.
            started: start of the request, as `time.monotonic()`.
            release: called in the event loop when the body is no longer needed.

        Raises:
            ApiError: the queue is full, the request timed out, or the server is shutting down.
            ClientDisconnect: the client has disconnected.
        """
        queue = self._queues[chat, size <= _SMALL_BODY_BYTES]
        job = Job(function, release)
        if not queue.put(job, self._limits.max_encoding_queue_size):
            release()
            raise queue_full_error()
        self._jobs.add(job)
        try:
            return await wait_for_result(job.future, receive=receive, started=started, limits=self._limits)
        finally:
            job.future.cancel()
            self._jobs.discard(job)
            queue.remove(job)

    @property
    def problem(self) -> str:
        """Reason why requests cannot be encoded now, or ''."""
        seconds = max(queue.busy_seconds for queue in self._queues.values())
        return f'all threads that encode requests have been busy for {seconds:.0f} s' if seconds > STUCK_SECONDS else ''

    def fail_all(self, error: ApiError) -> None:
        """Fails all pending jobs with an error."""
        for job in list(self._jobs):
            job.fail(error)

    def close(self) -> None:
        """Stops the threads after their current jobs."""
        for queue in self._queues.values():
            queue.close()


async def wait_for_result(
    future: asyncio.Future[Any], *, receive: Receive, started: float, limits: ServerLimits
) -> Any:
    """Returns the result of a future, for a request that started at `started`, as `time.monotonic()`.

    Raises:
        ApiError: the request timed out.
        ClientDisconnect: the client has disconnected.
    """
    disconnect_task = asyncio.create_task(wait_for_disconnect(receive))
    try:
        timeout = max(0, started + limits.request_timeout - time.monotonic())
        await asyncio.wait({future, disconnect_task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise ClientDisconnect if disconnect_task.done() else timeout_error(limits)
    finally:
        disconnect_task.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Waits until the client of a request, whose body has been read, disconnects."""
    while (await receive())['type'] != 'http.disconnect':
        pass


def queue_full_error(retry_after: int = 5) -> ApiError:
    """Returns the error for a request that finds a queue full, and may be sent again after some seconds."""
    return ApiError(
        429,
        'too many requests are waiting; try again later',
        kind='rate_limit_error',
        code='queue_full',
        headers={'retry-after': str(retry_after)},
    )


def timeout_error(limits: ServerLimits) -> ApiError:
    """Returns the error for a request that exceeds its timeout."""
    return ApiError(
        504, f'the response took longer than {limits.request_timeout:g} s', kind='timeout_error', code='timeout'
    )


def draining_error() -> ApiError:
    """Returns the error for a request that the server's shutdown rejects or cuts off."""
    return ApiError(503, 'the server is shutting down', kind=SERVER, code='draining', headers={'retry-after': '5'})


def engine_error(status: int = 503) -> ApiError:
    """Returns the error for a request that a failure of the engine, which ends the server, rejects or cuts off."""
    return ApiError(status, 'the engine failed; the server is shutting down', kind=SERVER, code='engine_failed')
