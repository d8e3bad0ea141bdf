"""State of one served model: pending requests and admission control."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable

from maxlm.inference.engine.requests import Delta, QueueFullError, Request
from maxlm.serving.encoding import Encoders, draining_error, engine_error, queue_full_error, timeout_error
from maxlm.serving.engine_thread import EngineThread, StreamHandle
from maxlm.serving.grammar_queue import GrammarQueue
from maxlm.serving.limits import BodyReader, ServerLimits
from maxlm.serving.metrics import Metrics
from maxlm.serving.request_parsing import ServedModel
from maxlm.serving.responses import TokenDecoder
from maxlm.serving.schema.errors import SERVER, ApiError

# Maximum value of Retry-After.
_MAX_RETRY_SECONDS = 60


class PendingRequest:
    """Engine requests of one API request, until all their samples have ended.

    Attributes:
        num_choices: number of samples of all engine requests.
        num_unfinished: number of samples that have not ended.
        generated_tokens: number of tokens generated so far.
    """

    def __init__(self, service: Service, requests: list[Request], *, started: float):
        """Submits the requests to the engine. `started` is the start of the request, as `time.monotonic()`.

        Raises:
            ApiError: the queue is full, or the request has more samples than slots and queue can hold.
        """
        self._service, self._started = service, started
        self._deadline = started + service.limits.request_timeout
        self._deltas: asyncio.Queue[tuple[int, Delta] | ApiError] = asyncio.Queue()
        self._handles: list[StreamHandle] = []
        self._first_token_time = 0.0
        self.generated_tokens = 0
        num_samples = requests[0].num_samples
        self.num_choices = self.num_unfinished = num_samples * len(requests)
        num_slots, max_queue_size = service.served.engine.state.num_slots, service.limits.max_queue_size
        if max_queue_size and self.num_choices > num_slots + max_queue_size:
            raise ApiError(400, f'n: must be at most {num_slots + max_queue_size} choices over all prompts', param='n')
        try:
            for number, request in enumerate(requests):
                self._handles.append(
                    service.engine_thread.submit(request, functools.partial(self._on_delta, number * num_samples))
                )
        except QueueFullError:
            self.close()
            raise queue_full_error(service.retry_after()) from None
        service.pending.add(self)

    async def next_deltas(self, timeout: float) -> list[tuple[int, Delta]]:
        """Returns the new deltas of the choices; empty after `timeout` seconds without one.

        Raises:
            ApiError: the request timed out or was cancelled, the engine failed, or the server is shutting down.
        """
        deltas: list[tuple[int, Delta]] = []
        wait = min(timeout, self._deadline - time.monotonic())
        if wait > 0 or not self._deltas.empty():
            try:
                async with asyncio.timeout(max(wait, 0)):
                    deltas.append(self._checked(await self._deltas.get()))
            except TimeoutError:
                pass
        if not deltas and time.monotonic() >= self._deadline:
            raise timeout_error(self._service.limits)
        while not self._deltas.empty():
            deltas.append(self._checked(self._deltas.get_nowait()))
        return deltas

    def fail(self, error: ApiError) -> None:
        """Ends the request with an error."""
        self._deltas.put_nowait(error)

    def close(self) -> None:
        """Cancels unfinished samples."""
        self._service.pending.discard(self)
        for handle in self._handles if self.num_unfinished else ():
            handle.cancel()

    def _on_delta(self, first_choice: int, delta: Delta) -> None:
        now = time.monotonic()
        if delta.tokens:
            self.generated_tokens += len(delta.tokens)
            if not self._first_token_time:
                self._first_token_time = now
                self._service.metrics.first_token.observe(now - self._started)
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
            tokens_per_choice = self.generated_tokens / self.num_choices
            if not self.num_unfinished and tokens_per_choice > 1:
                self._service.metrics.token.observe((now - self._first_token_time) / (tokens_per_choice - 1))
        self._deltas.put_nowait((first_choice + delta.sample, delta))

    def _checked(self, item: tuple[int, Delta] | ApiError) -> tuple[int, Delta]:
        if isinstance(item, ApiError):
            raise item
        if item[1].finish_reason == 'failed':
            if item[1].error:
                self._service.metrics.grammars.labels('failed').inc()
                raise ApiError(500, item[1].error, kind=SERVER, code='grammar')
            raise engine_error(500)
        if item[1].finish_reason == 'cancelled':
            raise ApiError(503, 'the request was cancelled', kind=SERVER, code='cancelled')
        return item


class Service:
    """State shared by the endpoints. Must be created in the event loop.

    Attributes:
        served: the served model.
        limits: limits of the server.
        pending: requests that have not finished.
        is_draining: True if new requests are rejected because of a shutdown.
        num_requests: number of requests in progress.
        idle: set if no request is in progress.
    """

    def __init__(self, served: ServedModel, limits: ServerLimits, *, on_failure: Callable[[], None] = lambda: None):
        """Initializes the service. `on_failure` is called after an engine failure."""
        self.served, self.limits = served, limits
        self.metrics = Metrics(lambda: served.engine.state)
        self.body_reader = BodyReader(limits)
        self.token_decoder = TokenDecoder(served.tokenizer)
        self.engine_thread = EngineThread(served.engine, on_failure)
        self.pending: set[PendingRequest] = set()
        self.is_draining = False
        self.num_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.encoders = Encoders(limits)
        self.grammars = GrammarQueue(served.engine, limits, self.metrics)
        self._mean_seconds = 1.0

    def submit(self, requests: list[Request], *, started: float) -> PendingRequest:
        """Submits requests to the engine.

        Raises:
            ApiError: the service does not accept new requests.
        """
        self.check_ready()
        return PendingRequest(self, requests, started=started)

    def check_ready(self) -> None:
        """Raises ApiError if new requests are rejected."""
        if self.engine_thread.failed:
            raise engine_error()
        if self.is_draining:
            raise draining_error()

    @property
    def health(self) -> tuple[int, dict[str, str]]:
        """Status of the response to a health check, and its content.

        Without grammars, other requests are still served. A load balancer must not remove the server for this.
        """
        if self.engine_thread.failed or self.is_draining:
            return 503, {'status': 'failed' if self.engine_thread.failed else 'draining'}
        if reason := self.encoders.problem:
            return 503, {'status': 'degraded', 'reason': reason}
        if reason := self.grammars.problem:
            return 200, {'status': 'degraded', 'reason': reason}
        return 200, {'status': 'ok'}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a model is not served here."""
        if name is not None and name != self.served.name:
            raise ApiError(
                404,
                f'the model {name[:100]!r} is not available; use {self.served.name!r}',
                param='model',
                code='model_not_found',
            )

    def retry_after(self) -> int:
        """Returns the estimated seconds until a slot is free, from the queue length and recent durations."""
        state = self.served.engine.state
        return max(1, min(_MAX_RETRY_SECONDS, math.ceil(self._mean_seconds * (state.waiting + 1) / state.num_slots)))

    def begin_request(self) -> None:
        """Counts a new request."""
        self.num_requests += 1
        self.idle.clear()

    def record_duration(self, seconds: float) -> None:
        """Updates the mean duration of responses."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def end_request(self) -> None:
        """Counts the end of a request."""
        self.num_requests -= 1
        if not self.num_requests:
            self.idle.set()

    def fail_all(self) -> None:
        """Fails all pending requests, because the server is shutting down."""
        self.encoders.fail_all(draining_error())
        self.grammars.fail_all(draining_error())
        for request in list(self.pending):
            request.fail(draining_error())

    def close(self, timeout: float) -> None:
        """Stops the threads. The engine thread has `timeout` seconds to finish its step."""
        self.encoders.close()
        self.grammars.close()
        self.engine_thread.stop(timeout)
