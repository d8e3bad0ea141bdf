"""One model being served: who asks, who still waits, and whether it takes more."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable

from maxlm.inference.engine.requests import Delta, QueueFullError, Request
from maxlm.serving.encoding import Encoders, stopping, too_slow
from maxlm.serving.engine_thread import EngineThread, StreamHandle
from maxlm.serving.errors import SERVER, ApiError
from maxlm.serving.limits import Bodies, ServerLimits
from maxlm.serving.metrics import Metrics
from maxlm.serving.request_parsing import ServedModel
from maxlm.serving.responses import TokenSpelling

# What a client that is refused waits at most.
_LONGEST_RETRY = 60


class PendingRequest:
    """The requests at the engine of one request of the API, until all their samples have ended.

    Attributes:
        num_choices: samples of all.
        drawn_tokens: so far.
    """

    def __init__(self, service: Service, requests: list[Request], *, started: float):
        """Hands them to the engine; `started` is by `time.monotonic`.

        Raises:
            ApiError: too much is waiting already.
        """
        self._service, self._started = service, started
        self._deadline = started + service.limits.max_seconds
        self._drawn: asyncio.Queue[tuple[int, Delta] | ApiError] = asyncio.Queue()
        self._tickets: list[StreamHandle] = []
        self._first = 0.0
        self.drawn_tokens = 0
        samples = requests[0].num_samples
        self.num_choices = self.left = samples * len(requests)
        slots, waiting = service.served.engine.state.num_slots, service.limits.max_waiting
        if waiting and self.num_choices > slots + waiting:
            raise ApiError(400, f'n: at most {slots + waiting} answers at a time here, over all prompts', param='n')
        try:
            for number, request in enumerate(requests):
                self._tickets.append(service.pump.submit(request, functools.partial(self._put, number * samples)))
        except QueueFullError:
            self.close()
            raise ApiError(
                429,
                'too many requests are waiting; try again later',
                kind='rate_limit_error',
                code='queue_full',
                headers={'retry-after': str(service.retry_after())},
            ) from None
        service.open.add(self)

    async def batch(self, seconds: float) -> list[tuple[int, Delta]]:
        """What came for the choices since the last time, at least one; empty after `seconds` of nothing.

        Raises:
            ApiError: the time is over, the engine broke down, or the server ends.
        """
        found: list[tuple[int, Delta]] = []
        wait = min(seconds, self._deadline - time.monotonic())
        if wait > 0 or not self._drawn.empty():
            try:
                async with asyncio.timeout(max(wait, 0)):
                    found.append(self._checked(await self._drawn.get()))
            except TimeoutError:
                pass
        if not found and time.monotonic() >= self._deadline:
            raise too_slow(self._service.limits)
        while not self._drawn.empty():
            found.append(self._checked(self._drawn.get_nowait()))
        return found

    def end(self, error: ApiError) -> None:
        """Ends it with an error."""
        self._drawn.put_nowait(error)

    def close(self) -> None:
        """Nobody wants more of it: what runs is cancelled."""
        self._service.open.discard(self)
        for ticket in self._tickets if self.left else ():
            ticket.cancel()

    def _put(self, first: int, delta: Delta) -> None:
        now = time.monotonic()
        if delta.tokens:
            self.drawn_tokens += len(delta.tokens)
            if not self._first:
                self._first = now
                self._service.metrics.first_token.observe(now - self._started)
        if delta.finish is not None:
            self.left -= 1
            each = self.drawn_tokens / self.num_choices
            if not self.left and each > 1:
                self._service.metrics.token.observe((now - self._first) / (each - 1))
        self._drawn.put_nowait((first + delta.sample, delta))

    @staticmethod
    def _checked(item: tuple[int, Delta] | ApiError) -> tuple[int, Delta]:
        if isinstance(item, ApiError):
            raise item
        if item[1].finish == 'failed':
            raise ApiError(500, 'the engine broke down; the server ends', kind=SERVER, code='engine_failed')
        if item[1].finish == 'cancelled':
            raise ApiError(503, 'the answer was cancelled', kind=SERVER, code='cancelled')
        return item


class Service:
    """What the endpoints share. To be made in the event loop.

    Attributes:
        served, limits: these.
        open: questions that are not answered yet.
        draining: whether no more are taken.
        num_requests: those that are not over yet; `idle` is set when there are none.
    """

    def __init__(self, served: ServedModel, limits: ServerLimits, *, on_failure: Callable[[], None] = lambda: None):
        """`on_failure` is called when the engine has broken down."""
        self.served, self.limits = served, limits
        self.metrics = Metrics(lambda: served.engine.state)
        self.bodies = Bodies(limits)
        self.spelling = TokenSpelling(served.tokenizer)
        self.pump = EngineThread(served.engine, on_failure)
        self.open: set[PendingRequest] = set()
        self.draining = False
        self.num_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.encoders = Encoders(limits)
        self._mean_seconds = 1.0

    def ask(self, requests: list[Request], *, started: float) -> PendingRequest:
        """Hands requests to the engine.

        Raises:
            ApiError: it takes no more.
        """
        self.check_ready()
        return PendingRequest(self, requests, started=started)

    def check_ready(self) -> None:
        """Raises ApiError when no requests are taken."""
        if self.pump.failed:
            raise ApiError(503, 'the engine broke down; the server ends', kind=SERVER, code='engine_failed')
        if self.draining:
            raise ApiError(503, 'the server is stopping', kind=SERVER, code='draining', headers={'retry-after': '5'})

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is not None and name != self.served.name:
            raise ApiError(
                404,
                f'the model {name[:100]!r} is not here; there is {self.served.name!r}',
                param='model',
                code='model_not_found',
            )

    def retry_after(self) -> int:
        """Whole seconds until there may be room: what waits, at the pace of the last requests."""
        state = self.served.engine.state
        return max(1, min(_LONGEST_RETRY, math.ceil(self._mean_seconds * (state.waiting + 1) / state.num_slots)))

    def begin(self) -> None:
        """A request for an answer comes in."""
        self.num_requests += 1
        self.idle.clear()

    def took(self, seconds: float) -> None:
        """An answer took so long."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def finish(self) -> None:
        """It is over."""
        self.num_requests -= 1
        if not self.num_requests:
            self.idle.set()

    def end_all(self) -> None:
        """Ends all requests that are open."""
        self.encoders.end_all(stopping())
        for question in list(self.open):
            question.end(stopping())

    def close(self, timeout: float) -> None:
        """Lets go of the threads; that of the engine has `timeout` seconds for its step."""
        self.encoders.close()
        self.pump.stop(timeout)
