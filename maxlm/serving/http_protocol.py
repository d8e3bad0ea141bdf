"""HTTP connections that limit the size, the duration and the processing time of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maxlm.serving.limits import ServerLimits
from maxlm.serving.schema.errors import ApiError

# Maximum number of bytes that a connection parses before other connections continue.
_READ_BYTES = 16 * 1024
# Maximum size of a head, and of chunk sizes, extensions and trailers of a body. They may exceed it by _READ_BYTES. The
# library parses no longer URL than 64 KiB. Bodies whose chunks have more than 60 bytes on average always fit.
_MAX_FRAMING_BYTES = 32 * 1024
_BODY_BYTES_PER_FRAMING_BYTE = 8
_MAX_HEADERS = 256
# Seconds in which a client can read the error before the connection closes, although it still sends.
_LINGER_SECONDS = 2


class _FlowControl(FlowControl):
    """Pauses reading while pipelined requests wait, so that their number stays bounded."""

    def __init__(self, transport: asyncio.Transport, pipeline: Collection[Any]):
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A uvicorn connection with limits. To the app, an aborted connection looks like a disconnected client."""

    limits = ServerLimits()
    _write_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._is_in_head = self._is_rejected = False
        self._num_framing_bytes = self._num_body_bytes = 0

    # uvicorn narrows the type of the parameter relative to its base class, and this override follows it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Applies the connection limits and starts the read timer."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self.flow = _FlowControl(transport, self.pipeline)
        # `connections` contains all open connections, including this one.
        own = [each for each in self.connections if self._client_address(each) == self._client_address(self)]
        if len(own) > self.limits.max_client_connections:
            self._make_place(own)
        elif len(self.connections) > self.limits.max_connections:
            self._make_place(self.connections)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        self._cancel_timer(self._write_timer)
        self._cancel_timer(self._read_timer)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer of the next read, whose size bounds the time until other connections continue."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parses the bytes of a read."""
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Starts the read timer if it is not running, or cancels it while a request is in progress."""
        if self._is_rejected:
            return
        self._unset_keepalive_if_required()
        self._num_framing_bytes += len(data)
        try:
            self._parse(data)
            self._check_framing()
        except ApiError as error:
            self._reject(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._reject(cause if isinstance(cause, ApiError) else _invalid_request('not a valid HTTP request'))
        if self._is_answering:
            self._cancel_timer(self._read_timer)
            self._read_timer = None
        elif self._read_timer is None:
            self._start_read_timer()

    def on_message_begin(self) -> None:
        """Starts the head of a request."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_framing_bytes = self._num_body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header. Trailers are ignored, because they must not override headers."""
        if not self._is_in_head:
            return
        if len(self.headers) == _MAX_HEADERS:
            raise ApiError(431, f'the request has more than {_MAX_HEADERS} headers', code='invalid_http')
        super().on_header(name, value.rstrip(b' \t'))

    def on_headers_complete(self) -> None:
        """Starts a request, unless its target, version or framing is not supported."""
        self._is_in_head = False
        version = self.parser.get_http_version()
        # CONNECT is also the only message that asks for an upgrade without the header that `_parse` removes.
        if not self.url.startswith(b'/') or self.parser.get_method() == b'CONNECT':
            raise _invalid_request('the request must have a path, and another method than CONNECT')
        if version not in ('1.0', '1.1'):
            raise _invalid_request('the version must be HTTP/1.1')
        codings = [value.strip().lower() for name, value in self.headers if name == b'transfer-encoding']
        # Proxies may find another end of the body than this server if other codings were accepted.
        if codings and (codings != [b'chunked'] or version == '1.0'):
            raise _invalid_request('transfer-encoding: must be chunked, in HTTP/1.1')
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts the bytes of a body."""
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the body, except for the message that asks for an upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

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
        self._idle_since = self.loop.time()
        if self.transport.is_closing():
            # The transport closes only after the client has read everything.
            self._cancel_timer(self._write_timer)
            self._write_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, even if its client has not read the last response."""
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser ends a message that asks for an upgrade, such as those of Java's client, before its body.
                # The server supports no upgrade, so another parser gets the message without this header.
                lines = [self.parser.get_method() + b' ' + self.url + b' HTTP/1.1']
                lines += [name + b': ' + value for name, value in self.headers if name != b'upgrade']
                self.parser = httptools.HttpRequestParser(self)
                data = b'\r\n'.join([*lines, b'', b'']) + data[upgrade.args[0] :]

    def _check_framing(self) -> None:
        """Raises ApiError if a head is too large, or a body consists of too many small chunks."""
        excess = self._num_framing_bytes - self._num_body_bytes // _BODY_BYTES_PER_FRAMING_BYTE
        if excess > _MAX_FRAMING_BYTES:
            if self._is_in_head:
                raise ApiError(
                    431, f'the head of the request has more than {_MAX_FRAMING_BYTES} bytes', code='invalid_http'
                )
            raise _invalid_request('the body has too many small chunks, or long trailers; send larger chunks')

    def _reject(self, error: ApiError) -> None:
        """Responds to malformed HTTP and closes the connection, or aborts it if a response has started."""
        if self._is_answering:
            if not self.cycle.more_body:
                # The request before the malformed bytes is complete. It is answered.
                self.cycle.keep_alive = False
                return
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            # To the app, the client has disconnected.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_rejected = True
        body = json.dumps(error.body).encode()
        reason = {400: b'Bad Request', 431: b'Request Header Fields Too Large'}[error.status]
        self.transport.write(
            b'HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s'
            % (error.status, reason, len(body), body)
        )
        # A connection that closes while bytes arrive is reset, and its client may lose the response.
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _make_place(self, connections: Collection[Any]) -> None:
        """Closes the connection that has waited longest for a request, or this one if all are in use."""
        idle = [each for each in connections if not each._is_answering]
        oldest = min(idle, key=lambda each: each._idle_since)
        # Many connections may be made before the event loop reports that this one is lost.
        self.connections.discard(oldest)
        oldest.transport.abort()

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


def _invalid_request(message: str) -> ApiError:
    return ApiError(400, message, code='invalid_http')
