"""Feeds raw bytes to HTTP connections without sockets, and parses the responses strictly."""

import asyncio
import contextlib
import re
from typing import NamedTuple

import uvicorn
from uvicorn.server import ServerState

from maxlm.serving.app import make_app
from maxlm.serving.http_protocol import connection_class
from maxlm.serving.limits import ServerLimits
from maxlm.serving.middleware import AccessPolicy
from maxlm.serving.service import Service
from tests.serving.fake_engine import FakeEngine, served_by

LIMITS = ServerLimits(max_request_bytes=32 * 1024)
_STATUS_LINE = re.compile(rb'HTTP/1\.1 (\d{3}) [A-Za-z -]*')
_HEADER = re.compile(rb'([a-z-]+): ([ -~]*)')


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Transport:
    """A transport that keeps what is written.

    Attributes:
        output: bytes written.
        is_reading: False while the connection has paused reading.
        is_aborted: True after `abort`.
    """

    def __init__(self):
        self.output, self.is_reading, self.is_aborted, self._is_closing = bytearray(), True, False, False

    def get_extra_info(self, name, default=None):
        return {'peername': ('127.0.0.1', 1), 'sockname': ('127.0.0.1', 2)}.get(name, default)

    def write(self, data):
        if not self._is_closing:
            self.output += data

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def write_eof(self):
        self._is_closing = True

    close = write_eof

    def abort(self):
        self._is_closing = self.is_aborted = True

    def is_closing(self):
        return self._is_closing


class Harness:
    """A service with a fake engine, and connections to it.

    Attributes:
        service: the service.
        max_waiting: maximum number of pipelined requests that waited at the same time.
    """

    def __init__(self, limits=LIMITS):
        self._loop = asyncio.new_event_loop()
        self._limits = limits
        self.max_waiting = 0
        self.service = self._loop.run_until_complete(self._start())

    async def _start(self):
        service = Service(served_by(FakeEngine(max_context=600)), self._limits, on_failure=lambda: None)
        service.engine_thread.start()
        app = make_app(service, AccessPolicy(api_key='', loopback=True, origins=()))
        self._config = uvicorn.Config(app, ws='none', lifespan='off', log_config=None, access_log=False)
        self._config.load()
        return service

    def close(self):
        self.service.close(5)
        self._loop.close()

    def exchange(self, segments):
        """Returns the responses to the segments of one connection, and True if the server closed it."""
        return self._loop.run_until_complete(self._exchange(segments))

    async def _exchange(self, segments):
        transport = Transport()
        connection = connection_class(self._limits)(
            config=self._config, server_state=ServerState(), app_state={}, _loop=self._loop
        )
        connection.connection_made(transport)
        for segment in segments:
            rest = segment
            while rest and not transport.is_closing():
                await self._settle(lambda: transport.is_reading or transport.is_closing())
                buffer = connection.get_buffer(-1)
                size = min(len(buffer), len(rest))
                buffer[:size], rest = rest[:size], rest[size:]
                connection.buffer_updated(size)
                self.max_waiting = max(self.max_waiting, len(connection.pipeline))
        await self._settle(lambda: transport.is_closing() or not self._is_answering(connection))
        is_closed = transport.is_closing()
        connection.connection_lost(None)
        answers = parse_answers(bytes(transport.output), is_complete=not transport.is_aborted)
        # Requests of the closed connection end.
        await self._settle(lambda: not connection.tasks and self.service.body_reader.num_bytes == 0)
        return answers, is_closed

    @staticmethod
    def _is_answering(connection):
        cycle = connection.cycle
        return bool(connection.pipeline) or (cycle and not cycle.response_complete and not cycle.more_body)

    @staticmethod
    async def _settle(condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.0002)


def parse_answers(output, *, is_complete=True):
    """Returns the responses in the output. Raises AssertionError unless all are well-formed HTTP/1.1."""
    answers = []
    while output:
        with contextlib.suppress(_IncompleteError):
            answer, output = _parse_answer(output)
            answers += [answer] if answer.status != 100 else []
            continue
        assert not is_complete, output[:500]
        break
    return answers


class _IncompleteError(Exception):
    pass


def _parse_answer(output):
    head, end, rest = output.partition(b'\r\n\r\n')
    if not end:
        raise _IncompleteError
    first, *lines = head.split(b'\r\n')
    found = _STATUS_LINE.fullmatch(first)
    assert found, first
    pairs = [_HEADER.fullmatch(line) for line in lines]
    assert all(pairs), lines
    headers = {pair[1]: pair[2] for pair in pairs}
    assert len(headers) == len(lines), lines
    body = b''
    if b'content-length' in headers:
        assert b'transfer-encoding' not in headers
        size = int(headers[b'content-length'])
        body, rest = rest[:size], rest[size:]
        if len(body) < size:
            raise _IncompleteError
    elif b'transfer-encoding' in headers:
        size = 1
        while size:
            line, end, rest = rest.partition(b'\r\n')
            if not end or len(rest) < int(line, 16) + 2:
                raise _IncompleteError
            size = int(line, 16)
            assert rest[size : size + 2] == b'\r\n'
            body, rest = body + rest[:size], rest[size + 2 :]
    else:
        assert found[1] == b'100', head
    return Answer(int(found[1]), headers, body), rest
