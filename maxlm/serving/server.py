"""Server lifecycle: listens, serves, and drains running requests after a signal."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator

import uvicorn

from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, os_message
from maxlm.log import logger
from maxlm.runtime.termination import termination_signals
from maxlm.serving.app import make_app
from maxlm.serving.http_protocol import connection_class
from maxlm.serving.limits import ServerLimits
from maxlm.serving.middleware import AccessPolicy
from maxlm.serving.request_parsing import ServedModel
from maxlm.serving.service import Service

_KEEP_ALIVE_SECONDS = 75
# Seconds that cancelled requests, connections and the engine each have after the drain.
_SHUTDOWN_STEP_SECONDS = 2
# Seconds after the drain until the process exits unconditionally.
_SHUTDOWN_SECONDS = 5
_BACKLOG = 1024
_MAX_PORT = 65535


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet, so clients are refused until the model is ready.

    Raises:
        InputError: the address does not belong to this machine or is in use.
    """
    if not 0 <= port <= _MAX_PORT:
        raise InputError(f'--port={port}: must be from 0 to {_MAX_PORT}')
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise InputError(f'--host={host} --port={port}: {os_message(error)}; choose another') from error
    return listener


def server_url(listener: socket.socket) -> str:
    """Returns the URL of the server for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {'0.0.0.0': '127.0.0.1', '::': '::1'}.get(host, host)
    return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


def is_loopback(listener: socket.socket) -> bool:
    """Returns True if only this machine can connect."""
    host = listener.getsockname()[0]
    return host.startswith('127.') or host == '::1'


class _UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers: uvicorn's would stop listening immediately and exit by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """An HTTP server in an event loop.

    Attributes:
        service: the service, or None before `run`.
    """

    def __init__(
        self,
        served: ServedModel,
        limits: ServerLimits,
        listener: socket.socket,
        *,
        api_key: str = '',
        origins: Collection[str] = (),
        docs: bool = False,
        on_ready: Callable[[], None] = lambda: None,
    ):
        """Initializes the server. `docs` adds the API reference; `on_ready` is called when the server listens."""
        self._served, self._limits, self._listener = served, limits, listener
        self._access = AccessPolicy(api_key=api_key, loopback=is_loopback(listener), origins=origins)
        self._origins, self._docs, self._on_ready = tuple(origins), docs, on_ready
        self._stop_event = asyncio.Event()
        self.service: Service | None = None

    async def run(self) -> int:
        """Serves until `stop` is called, and returns the exit code."""
        service = self.service = Service(self._served, self._limits, on_failure=self._stop_event.set)
        config = uvicorn.Config(
            make_app(service, self._access, origins=self._origins, docs=self._docs),
            http=connection_class(self._limits),
            ws='none',
            lifespan='off',
            # Malformed requests must not fill the log.
            log_config=None,
            log_level='critical',
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_STEP_SECONDS,
            backlog=_BACKLOG,
        )
        server = _UvicornServer(config)
        service.engine_thread.start()
        serve_task = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            while not (server.started or serve_task.done()):
                await asyncio.sleep(0.01)
            if server.started:
                self._on_ready()
                stop_task = asyncio.create_task(self._stop_event.wait())
                await asyncio.wait({stop_task, serve_task}, return_when=asyncio.FIRST_COMPLETED)
                stop_task.cancel()
                await self._drain(service)
        finally:
            server.should_exit = True
            await serve_task
            service.close(_SHUTDOWN_SECONDS - 2 * _SHUTDOWN_STEP_SECONDS)
        return EXIT_FAILED if service.engine_thread.failed else EXIT_DONE

    def stop(self) -> None:
        """Rejects new requests and finishes running ones. Must be called in the event loop."""
        self._stop_event.set()

    @property
    def drain_seconds(self) -> float:
        """Maximum number of seconds for running requests to finish."""
        return self._limits.drain_seconds

    @property
    def is_stopping(self) -> bool:
        """True if `stop` was called or the engine failed."""
        return self._stop_event.is_set()

    async def _drain(self, service: Service) -> None:
        service.is_draining = True
        try:
            async with asyncio.timeout(self._limits.drain_seconds):
                await service.idle.wait()
        except TimeoutError:
            logger.warning(
                f'aborting {service.num_requests} requests not finished within {self._limits.drain_seconds:g} s'
            )
            service.fail_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SHUTDOWN_STEP_SECONDS):
                    await service.idle.wait()


def serve_until_stopped(server: Server) -> int:
    """Runs a server in this process and returns the exit code.

    SIGTERM, SIGINT or SIGHUP stops the server. A second SIGTERM or SIGINT exits immediately.
    """

    async def run() -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, *termination_signals()):
            loop.add_signal_handler(number, handle_signal, number)
        return await server.run()

    def handle_signal(number: signal.Signals) -> None:
        if server.is_stopping and number == signal.SIGHUP:
            # The shell and the kernel both send it when a terminal is closed.
            return
        if server.is_stopping:
            # Exit without joining threads, because device threads may hang.
            os._exit(128 + number)
        logger.info(
            f'{number.name}: finishing running requests and rejecting new ones; '
            'send a second signal to exit immediately'
        )
        # Runs outside the interpreter: a Python thread could be blocked by a thread that never releases the GIL.
        faulthandler.dump_traceback_later(server.drain_seconds + _SHUTDOWN_SECONDS, exit=True)
        server.stop()

    # Otherwise each full garbage collection traverses the objects of all imported libraries, for about 0.2 s.
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(run())
    finally:
        faulthandler.cancel_dump_traceback_later()
