"""Threads that parse and tokenize requests: a long text must not delay other requests."""

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

from maxlm.serving.errors import SERVER, ApiError
from maxlm.serving.limits import ServerLimits
from maxlm.storage.errors import catch_panics

# Bytes of a body that does not wait behind larger ones.
_SMALL_BODY_BYTES = 64 * 1024
# Threads for small bodies, and for larger ones.
_NUM_SMALL_THREADS, _NUM_LARGE_THREADS = 2, 1


class _Job:
    """A function to be called, and the future of its result in the event loop."""

    def __init__(self, function: Callable[[], Any], release: Callable[[], None]):
        self.function, self.release = function, release
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Calls the function, in a thread; its result is dropped after the request was cancelled."""
        result, error = None, None
        try:
            with catch_panics('tokenizers'):
                result = self.function()
        except BaseException as raised:
            error = raised
        # The loop may be gone by now.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._finish, result, error)

    def fail(self, error: Exception) -> None:
        """Ends the wait for the result with an error."""
        if not self.future.done():
            self.future.set_exception(error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self.release()
        if not self.future.done():
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class _WorkQueue:
    """A queue with threads of its own. They do not keep the process from its end."""

    def __init__(self, name: str, num_threads: int):
        self._jobs: collections.deque[_Job] = collections.deque()
        self._condition = threading.Condition()
        self._is_closed = False
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: _Job, max_jobs: int) -> bool:
        """Adds a job unless `max_jobs` are waiting; whether it did."""
        with self._condition:
            if len(self._jobs) >= max_jobs:
                return False
            self._jobs.append(job)
            self._condition.notify()
        return True

    def remove(self, job: _Job) -> None:
        """Takes a job away that still waits."""
        with self._condition:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        job.release()

    def close(self) -> None:
        """Ends the threads after what they are at."""
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
            job.run()
            # Its body must not be kept until the next one comes.
            del job


class Encoders:
    """Encodes requests in four queues: small and large bodies, of texts and of conversations.

    So neither a large text nor a slow chat template holds up small texts.
    """

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self._queues = {
            (chat, small): _WorkQueue(
                f'encode-{"chat" if chat else "text"}-{"small" if small else "large"}',
                _NUM_SMALL_THREADS if small else _NUM_LARGE_THREADS,
            )
            for chat in (False, True)
            for small in (False, True)
        }
        self._jobs: set[_Job] = set()

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
        """The result of a function, called in a thread.

        Args:
            function: what parses and tokenizes.
            chat: whether it renders a chat template.
            size: bytes of the body.
            receive: that of the request, whose body has been read.
            started: beginning of the request, by `time.monotonic`.
            release: called in the event loop when the body is not needed any more.

        Raises:
            ApiError: too many are waiting, it takes too long, or the server ends.
            ClientDisconnect: the client is gone.
        """
        queue = self._queues[chat, size <= _SMALL_BODY_BYTES]
        job = _Job(function, release)
        if not queue.put(job, self._limits.max_encoding_queue_size):
            release()
            raise ApiError(
                429,
                'too many requests are waiting; try again later',
                kind='rate_limit_error',
                code='queue_full',
                headers={'retry-after': '5'},
            )
        self._jobs.add(job)
        disconnect_task = asyncio.create_task(_wait_for_disconnect(receive, job))
        try:
            async with asyncio.timeout(max(0, started + self._limits.request_timeout - time.monotonic())):
                return await job.future
        except TimeoutError:
            raise timeout_error(self._limits) from None
        finally:
            disconnect_task.cancel()
            job.future.cancel()
            self._jobs.discard(job)
            queue.remove(job)

    def fail_all(self, error: ApiError) -> None:
        """Ends all that wait with an error."""
        for job in list(self._jobs):
            job.fail(error)

    def close(self) -> None:
        """Ends the threads; one that is stuck stays until the process ends."""
        for queue in self._queues.values():
            queue.close()


def timeout_error(limits: ServerLimits) -> ApiError:
    """Returns the error of a response that exceeds its time limit."""
    return ApiError(
        504, f'the answer took longer than {limits.request_timeout:g} s', kind='timeout_error', code='timeout'
    )


def draining_error() -> ApiError:
    """Returns the error of a response that the server's shutdown cuts off."""
    return ApiError(503, 'the server is stopping', kind=SERVER, code='draining')


async def _wait_for_disconnect(receive: Receive, job: _Job) -> None:
    while (await receive())['type'] != 'http.disconnect':
        pass
    job.fail(ClientDisconnect())
