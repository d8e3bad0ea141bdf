"""Threads that parse and tokenize requests: a long text must not hold up the answers of others."""

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
_SMALL = 64 * 1024
# Threads for small bodies, and for larger ones.
_SMALL_THREADS, _LARGE_THREADS = 2, 1


class _Job:
    """A function to be called, and the future of its result in the event loop."""

    def __init__(self, function: Callable[[], Any], release: Callable[[], None]):
        self.function, self.release = function, release
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Calls the function, in a thread; its result is left out when nobody waits for it any more."""
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


class _Lane:
    """A queue with threads of its own. They do not keep the process from its end."""

    def __init__(self, name: str, num_threads: int):
        self._jobs: collections.deque[_Job] = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: _Job, most: int) -> bool:
        """Adds a job unless `most` are waiting; whether it did."""
        with self._changed:
            if len(self._jobs) >= most:
                return False
            self._jobs.append(job)
            self._changed.notify()
        return True

    def drop(self, job: _Job) -> None:
        """Takes a job away that still waits."""
        with self._changed:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        job.release()

    def close(self) -> None:
        """Ends the threads after what they are at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
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
        self._lanes = {
            (chat, small): _Lane(
                f'encode-{"chat" if chat else "text"}-{"small" if small else "large"}',
                _SMALL_THREADS if small else _LARGE_THREADS,
            )
            for chat in (False, True)
            for small in (False, True)
        }
        self._open: set[_Job] = set()

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
        lane = self._lanes[chat, size <= _SMALL]
        job = _Job(function, release)
        if not lane.put(job, self._limits.max_encoding):
            release()
            raise ApiError(
                429,
                'too many requests are waiting; try again later',
                kind='rate_limit_error',
                code='queue_full',
                headers={'retry-after': '5'},
            )
        self._open.add(job)
        gone = asyncio.create_task(_until_gone(receive, job))
        try:
            async with asyncio.timeout(max(0, started + self._limits.max_seconds - time.monotonic())):
                return await job.future
        except TimeoutError:
            raise too_slow(self._limits) from None
        finally:
            gone.cancel()
            job.future.cancel()
            self._open.discard(job)
            lane.drop(job)

    def end_all(self, error: ApiError) -> None:
        """Ends all that wait with an error."""
        for job in list(self._open):
            job.fail(error)

    def close(self) -> None:
        """Ends the threads; one that is stuck stays until the process ends."""
        for lane in self._lanes.values():
            lane.close()


def too_slow(limits: ServerLimits) -> ApiError:
    """The error of an answer that takes longer than its time."""
    return ApiError(504, f'the answer took longer than {limits.max_seconds:g} s', kind='timeout_error', code='timeout')


def stopping() -> ApiError:
    """The error of an answer that the end of the server cuts off."""
    return ApiError(503, 'the server is stopping', kind=SERVER, code='draining')


async def _until_gone(receive: Receive, job: _Job) -> None:
    while (await receive())['type'] != 'http.disconnect':
        pass
    job.fail(ClientDisconnect())
