"""Queue of grammars to compile, so that requests without a grammar never wait for one."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable

from starlette.types import Receive

from maxlm.errors import InputError
from maxlm.inference.engine.grammar import LIMITS, GrammarsBusyError, GrammarsUnavailableError, TooComplexError
from maxlm.inference.engine.requests import Request
from maxlm.sandbox.limited_process import RequestCancelledError
from maxlm.serving.encoding import Job, WorkQueue, queue_full_error, wait_for_result
from maxlm.serving.engine_thread import EngineLike
from maxlm.serving.limits import ServerLimits
from maxlm.serving.metrics import Metrics
from maxlm.serving.request_parsing import EngineRequests
from maxlm.serving.schema.errors import SERVER, ApiError

MAX_QUEUE_SIZE = 32
# A compilation that takes longer than its limits is stuck.
STUCK_SECONDS = LIMITS.timeout + 30
# Compilation uses a part of the cores, because the engine and other requests need them too.
_CORES_PER_THREAD = 4


class _Compilation:
    """A grammar that is compiled for one or more requests."""

    def __init__(self, job: Job, is_cancelled: threading.Event):
        self.job, self.is_cancelled = job, is_cancelled
        self.num_waiting = 0


class GrammarQueue:
    """Compiles the grammars of requests in their order. Must be created in the event loop."""

    def __init__(self, engine: EngineLike, limits: ServerLimits, metrics: Metrics):
        """Starts the threads."""
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._queue = WorkQueue('grammar', max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD))
        # One compilation for all requests with the same grammar.
        self._compilations: dict[tuple[str, str], _Compilation] = {}
        self._start_error = ''
        metrics.grammar_queue.set_function(lambda: self._queue.num_waiting)

    async def prepare(self, parsed: EngineRequests, *, receive: Receive, started: float) -> EngineRequests:
        """Returns the requests with a compiled grammar, if they have a grammar.

        Args:
            parsed: engine requests of one API request, all with the same grammar.
            receive: ASGI receive channel of the request, whose body has been read.
            started: start of the request, as `time.monotonic()`.

        Raises:
            ApiError: the grammar is invalid or too complex, the queue is full, the request timed out, or the server is
                shutting down.
            ClientDisconnect: the client has disconnected.
        """
        request = parsed.requests[0]
        if not isinstance(request.grammar, str) or not request.grammar:
            return parsed
        try:
            prepared = self._prepared(request, parsed, is_cancelled=lambda: True)
        except RequestCancelledError:
            prepared = await self._compiled(request, parsed, receive=receive, started=started)
        requests = [dataclasses.replace(each, grammar=prepared.grammar) for each in parsed.requests]
        return parsed._replace(requests=requests)

    @property
    def problem(self) -> str:
        """Reason why grammars cannot be compiled now, or ''."""
        if self._start_error:
            return self._start_error
        if self._queue.busy_seconds > STUCK_SECONDS:
            return f'a grammar has been compiling for {self._queue.busy_seconds:.0f} s'
        return 'the queue of grammars is full' if self._queue.num_waiting >= MAX_QUEUE_SIZE else ''

    def fail_all(self, error: ApiError) -> None:
        """Fails all requests that wait for a grammar."""
        for compilation in self._compilations.values():
            compilation.is_cancelled.set()
            compilation.job.fail(error)

    def close(self) -> None:
        """Cancels the compilations and stops the threads."""
        for compilation in self._compilations.values():
            compilation.is_cancelled.set()
        self._queue.close()

    async def _compiled(self, request: Request, parsed: EngineRequests, *, receive: Receive, started: float) -> Request:
        """Waits for the compilation, which ends early if nobody waits for it."""
        assert isinstance(request.grammar, str)
        key = request.grammar, parsed.grammar_param
        compilation = self._compilations.get(key) or self._start(key, request, parsed)
        future = compilation.job.future
        compilation.num_waiting += 1
        try:
            prepared: Request = await wait_for_result(future, receive=receive, started=started, limits=self._limits)
            return prepared
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting:
                compilation.is_cancelled.set()
                future.cancel()
                self._queue.remove(compilation.job)
                self._compilations.pop(key, None)

    def _start(self, key: tuple[str, str], request: Request, parsed: EngineRequests) -> _Compilation:
        is_cancelled = threading.Event()

        def compile_now() -> Request:
            prepared = self._prepared(request, parsed, is_cancelled=is_cancelled.is_set)
            self._metrics.grammars.labels('compiled').inc()
            return prepared

        job = Job(compile_now, lambda: None)
        if not self._queue.put(job, MAX_QUEUE_SIZE):
            raise queue_full_error()
        compilation = self._compilations[key] = _Compilation(job, is_cancelled)
        return compilation

    def _prepared(self, request: Request, parsed: EngineRequests, *, is_cancelled: Callable[[], bool]) -> Request:
        """Returns the request with its compiled grammar. Raises ApiError, and RequestCancelledError."""
        try:
            prepared = self._engine.prepare(request, is_cancelled)
            self._start_error = ''
            return prepared
        except RequestCancelledError:
            raise
        except GrammarsBusyError:
            raise queue_full_error() from None
        except GrammarsUnavailableError as error:
            self._start_error = str(error)
            raise ApiError(503, str(error), kind=SERVER, code='grammars_unavailable') from None
        except InputError as error:
            self._start_error = ''
            self._metrics.grammars.labels('refused').inc()
            raise self._named(error, request, parsed, is_cancelled) from None

    def _named(
        self, error: InputError, request: Request, parsed: EngineRequests, is_cancelled: Callable[[], bool]
    ) -> ApiError:
        """Returns the error of a grammar, with the name of the parameter that it comes from."""
        param, parts = parsed.grammar_param, parsed.grammar_parts
        if isinstance(error, TooComplexError):
            param = next(iter(parts)) if len(parts) == 1 else param
        else:
            for name, grammar in parts.items():
                try:
                    self._engine.prepare(dataclasses.replace(request, grammar=grammar), is_cancelled)
                except RequestCancelledError:
                    pass
                except InputError as part_error:
                    param, error = name, part_error
                    break
        return ApiError(400, f'{param}: {str(error).removeprefix("grammar: ")}', param=param)
