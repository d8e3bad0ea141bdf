"""The engine's own thread: it steps while there is work and passes deltas to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from maxlm.inference.engine.requests import Delta, EngineState, Request
from maxlm.log import logger

# A request ends the wait; this bounds how long the thread outlives `stop`.
_POLL_SECONDS = 0.2

Listener = Callable[[Delta], None]


class StreamHandle(Protocol):
    """A request that the engine has."""

    def cancel(self) -> None:
        """Cancels the request."""


class EngineLike(Protocol):
    """The interface of the engine, documented in `maxlm.inference.engine.engine.Engine`."""

    max_context: int

    @property
    def state(self) -> EngineState:
        """Queue lengths and counters."""

    def check(self, request: Request) -> None:
        """Raises InputError if a request does not fit."""

    def submit(self, request: Request, listener: Listener) -> StreamHandle:
        """Takes a request."""

    def step(self) -> bool:
        """One token for each slot."""

    def wait(self, timeout: float) -> None:
        """Until there is something to do."""

    def fail(self) -> None:
        """Ends all samples."""


class EngineThread:
    """Steps an engine, and calls listeners in the event loop: once for all that a step brought.

    Attributes:
        failed: whether the engine broke down. It does not step again.
    """

    def __init__(self, engine: EngineLike, on_failure: Callable[[], None]):
        """`on_failure` is called in the event loop when the engine has broken down."""
        self.failed = False
        self._engine, self._on_failure = engine, on_failure
        self._deltas: list[tuple[Listener, Delta]] = []
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A step that never ends must not keep the process.
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        """To be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> bool:
        """Ends the thread after the step that it is in; whether it did within the time."""
        self._is_stopped = True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> StreamHandle:
        """As the engine's; the listener is called in the event loop.

        Raises:
            InputError, QueueFullError: the engine's.
        """
        return self._engine.submit(request, lambda delta: self._deltas.append((listener, delta)))

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                has_work = self._engine.step()
                self._dispatch()
                if not has_work:
                    self._engine.wait(_POLL_SECONDS)
        except Exception:
            logger.exception('the engine broke down')
            self.failed = True
            self._fail_all()
            self._call_in_loop(self._on_failure)
            # Requests that were submitted before the failure was visible.
            while not self._is_stopped:
                self._engine.wait(_POLL_SECONDS)
                self._fail_all()

    def _fail_all(self) -> None:
        self._engine.fail()
        self._dispatch()

    def _dispatch(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._call_in_loop(lambda: [listener(delta) for listener, delta in deltas])

    def _call_in_loop(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        # The loop may be gone while the last step still runs.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)
