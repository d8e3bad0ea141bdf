"""Metadata services of AWS and Azure on loopback, with the requirements of the real ones."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class LoopbackServer(abc.ABC):
    """Context manager that serves `values`, with 404 for missing paths. `url` is the value for the endpoint variables.

    Attributes:
        values: path → response.
        status: status of all responses; 0 = normal responses.
        requests: number of normal requests per path.
    """

    def __init__(self, values: dict[str, str] | None = None):
        self.values = dict(values or {})
        self.status = 0
        self.requests: Counter[str] = Counter()
        self._changed = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._respond(self)

            do_PUT = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self._server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self._server.server_port}'

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for_requests(self, path: str, number: int = 2) -> None:
        """Waits for further requests of a path. The first may have been sent before the last change of the values."""
        with self._changed:
            goal = self.requests[path] + number
            assert self._changed.wait_for(lambda: self.requests[path] >= goal, timeout=30), self.requests

    @abc.abstractmethod
    def answer(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str]:
        """Returns the status and the text of a response."""

    def _respond(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        status, text = (self.status, '') if self.status else self.answer(request, path)
        request.send_response(status)
        request.end_headers()
        # The watcher does not read long responses to their end.
        with contextlib.suppress(ConnectionError):
            request.wfile.write(text.encode())
        with self._changed:
            self.requests[path] += 1
            self._changed.notify_all()


class AwsServer(LoopbackServer):
    """Instance metadata service version 2: each GET needs a token from a PUT, which `expire` revokes."""

    def __init__(self, values: dict[str, str] | None = None):
        super().__init__(values)
        self._tokens: set[str] = set()

    def expire(self) -> None:
        """Revokes all tokens."""
        self._tokens.clear()

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str]:
        if request.command == 'PUT':
            # Forwarded requests are refused, as by the real service.
            assert 'X-Forwarded-For' not in request.headers
            assert path == '/latest/api/token'
            assert 1 <= int(request.headers['X-aws-ec2-metadata-token-ttl-seconds']) <= 21600
            token = f'token-{self.requests[path]}-{threading.get_ident()}'
            self._tokens.add(token)
            return 200, token
        if request.headers.get('X-aws-ec2-metadata-token') not in self._tokens:
            return 401, ''
        name = path.removeprefix('/latest/meta-data/')
        return (200, self.values[name]) if name in self.values else (404, '')


class AzureServer(LoopbackServer):
    """Metadata service that requires a header and a version. Its only values are `name` and `events`."""

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str]:
        query = parse_qs(urlsplit(request.path).query)
        if request.headers.get('Metadata') != 'true' or 'api-version' not in query:
            return 400, '{"error": "Bad request"}'
        if path == '/metadata/scheduledevents' and query['api-version'] == ['2020-07-01']:
            return 200, self.values['events']
        if path == '/metadata/instance/compute/name' and query.get('format') == ['text']:
            return 200, self.values['name']
        return 404, ''
