"""HTTP connections with timeouts for request heads and for clients that do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxlm.serving.limits import ServerLimits
from maxlm.serving.schema.errors import ApiError


class Connection(H11Protocol):
    """A uvicorn connection with timeouts. To the app, an aborted connection looks like a disconnected client."""

    limits = ServerLimits()
    _write_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    # uvicorn narrows the type of the parameter relative to its base class, and this override follows it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Applies the connection limits and starts the read timer."""
        super().connection_made(transport)
        # `connections` contains all open connections, including this one.
        num_from_client = sum(
            self._client_address(connection) == self._client_address(self) for connection in self.connections
        )
        if len(self.connections) > self.limits.max_connections or num_from_client > self.limits.max_client_connections:
            transport.abort()
            return
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        self._cancel_timer(self._write_timer)
        self._cancel_timer(self._read_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Starts the read timer if it is not running, or cancels it while a request is in progress."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timer(self._read_timer)
            self._read_timer = None
        elif self._read_timer is None:
            self._start_read_timer()

    def pause_writing(self) -> None:
        """Starts the write timer."""
        self._cancel_timer(self._write_timer)
        self._write_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Cancels the write timer."""
        self._cancel_timer(self._write_timer)
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Cancels the read timer. The write timer and the keep-alive timeout keep running."""
        super().on_response_complete()
        self._cancel_timer(self._read_timer)
        self._read_timer = None

    def send_400_response(self, msg: str) -> None:
        """Responds to malformed HTTP with status 400, or aborts if a response has started."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(ApiError(400, 'not a valid HTTP request', code='invalid_http').body).encode()
        headers = [
            (b'content-type', b'application/json'),
            (b'content-length', str(len(body)).encode()),
            (b'connection', b'close'),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b'Bad Request'),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b'')
        self.transport.close()

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    @staticmethod
    def _client_address(connection: Any) -> str:
        return connection.client[0] if connection.client else ''

    @staticmethod
    def _cancel_timer(timer: Any) -> None:
        if timer is not None:
            timer.cancel()


def connection_class(limits: ServerLimits) -> type[Connection]:
    """Returns a connection class with these limits, because uvicorn instantiates connections itself."""
    return type('Connection', (Connection,), {'limits': limits})
