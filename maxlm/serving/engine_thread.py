"""Thread that steps the engine and passes deltas to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from maxlm.inference.engine.requests import Delta, EngineState, Request
from maxlm.log import logger

# A request interrupts the wait, so this only bounds how long `stop` waits for an idle thread.
_POLL_SECONDS = 0.2

Listener = Callable[[Delta], None]


class StreamHandle(Protocol):
    """Handle of a submitted request."""

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

    def prepare(self, request: Request, is_cancelled: Callable[[], bool] | None = None) -> Request:
        """Returns a request with its compiled grammar."""

    def submit(self, request: Request, listener: Listener) -> StreamHandle:
        """Queues a request."""

    def step(self) -> bool:
        """Runs one step. Returns False if no work is left."""

    def wait(self, timeout: float) -> None:
        """Waits for work, at most `timeout` seconds."""

    def fail(self) -> None:
        """Ends all samples."""


class EngineThread:
    """Steps an engine in a thread and calls listeners in the event loop, once per step for all deltas.

    Attributes:
        failed: True if the engine raised an exception. It is not stepped again.
    """

    def __init__(self, engine: EngineLike, on_failure: Callable[[], None]):
        """Initializes the thread. `on_failure` is called in the event loop after an engine failure."""
        self.failed = False
        self._engine, self._on_failure = engine, on_failure
        self._deltas: list[tuple[Listener, Delta]] = []
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon thread, so that a step that hangs does not block process exit.
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        """Starts the thread. Must be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> bool:
        """Stops the thread after its current step. Returns True if it ended within `timeout` seconds."""
        self._is_stopped = True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> StreamHandle:
        """Submits a request to the engine. The listener is called in the event loop.

        Raises:
            InputError: the engine rejects the request.
            QueueFullError: the queue of the engine is full.
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
            logger.exception('the engine failed')
            self.failed = True
            self._fail_all()
            self._call_in_loop(self._on_failure)
            # Fail requests that were submitted before `failed` was visible to the event loop.
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
        # The event loop may be closed while the last step still runs.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)
