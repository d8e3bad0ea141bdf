"""Calls methods of environments at the same time, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from maxlm.config.user_function import describe_exception
from maxlm.errors import InputError

# Seconds after the limit in which a cancelled coroutine may end.
GRACE_SECONDS = 1.0
# Number of calls that may ignore the limit before the run ends. A thread cannot be stopped.
MAX_BLOCKED = 64
# Largest limit of open files that the process sets. Some programs close all numbers up to their limit.
MAX_FILES = 2**17


def allow_open_files() -> None:
    """Raises the limit of open files of this process as far as it may, because event loops have three of them each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a lower limit of its own.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class CallFailure(NamedTuple):
    """A failed call. `reason` is the rest of a sentence whose subject is the method."""

    reason: str


class ConversationLoop:
    """Event loop of a conversation, created for its first coroutine, because a loop has three open files."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def run(self, found: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of a coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(found)
        finally:
            if self._is_closed:
                self._loop.close()

    def result(self, found: Any) -> Any:
        """Returns `found`, or its result if it must be awaited."""

        async def wait() -> Any:
            return await found

        return self.run(wait()) if inspect.isawaitable(found) else found

    def close(self) -> None:
        """Closes the loop, or lets a call that ignores the limit close it at its end."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()


class EnvironmentCall(NamedTuple):
    """A call of a method.

    Attributes:
        loop: event loop of the conversation. Only one call at a time may use it.
        method: the method.
        arguments: its positional arguments.
    """

    loop: ConversationLoop
    method: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class EnvironmentCaller:
    """Runs calls in threads of their own, so that a call that blocks does not delay others."""

    def __init__(self, seconds: float):
        """`seconds` is the time limit of each call."""
        self._seconds = seconds
        self._blocked: list[threading.Thread] = []

    def __call__(self, calls: Sequence[EnvironmentCall]) -> list[Any]:
        """Returns the result of each call, or a CallFailure. Coroutines are awaited.

        Raises:
            InputError: too many calls of this caller still run after their limit, or there are too many threads.
        """
        results: list[list[Any]] = [[] for _ in calls]
        threads = [
            threading.Thread(target=self._run, args=pair, name='environment', daemon=True)
            for pair in zip(calls, results, strict=True)
        ]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:
            raise InputError(
                f'grpo.environment: this machine starts no more threads ({error}), and {len(calls)} conversations need '
                'one each; raise its limit of processes, or lower grpo.prompts_per_rollout'
            ) from error
        end = time.monotonic() + self._seconds + GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._blocked = [thread for thread in [*self._blocked, *threads] if thread.is_alive()]
        if len(self._blocked) > MAX_BLOCKED:
            raise InputError(
                f'grpo.environment: {len(self._blocked)} calls still run after the limit of '
                f'grpo.environment_timeout={self._seconds:g} s; fix the environment so that its methods end'
            )
        return [result[0] if result else self._late for result in results]

    @property
    def _late(self) -> CallFailure:
        return CallFailure(f'took more than grpo.environment_timeout={self._seconds:g} s')

    def _run(self, call: EnvironmentCall, result: list[Any]) -> None:
        try:
            found = call.method(*call.arguments)
            result.append(call.loop.run(self._wait(found)) if inspect.isawaitable(found) else found)
        # A method must not end the process or its thread without a result.
        except BaseException as error:
            result.append(CallFailure(f'raised {describe_exception(error)}'))

    async def _wait(self, found: Any) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await found
        except TimeoutError:
            if limit.expired():
                return self._late
            raise
