"""Google Cloud metadata server on loopback, which responds immediately or when a value changes."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PREFIX = '/computeMetadata/v1/instance/'


class MetadataServer:
    """Context manager that serves `values` (404 for missing keys). `host` is the value for GCE_METADATA_HOST."""

    def __init__(self, **values: str):
        self._values = {name.replace('_', '-'): value for name, value in values.items()}
        self._changed = threading.Condition()
        self._version = 1
        self._faults = 0
        self.asked: list[tuple[str, bool]] = []
        self.flavor = 'Google'
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self._server.daemon_threads = True
        self.host = f'127.0.0.1:{self._server.server_port}'

    def __enter__(self) -> MetadataServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.set()
        self._server.shutdown()
        self._server.server_close()

    def set(self, **values: str) -> None:
        """Changes values and notifies waiting requests."""
        with self._changed:
            self._values |= {name.replace('_', '-'): value for name, value in values.items()}
            self._version += 1
            self._changed.notify_all()

    def fail(self, times: int) -> None:
        """Truncates the next `times` responses."""
        self._faults = times

    def wait_until_asked(self, key: str, *, waiting: bool) -> None:
        """Waits until a client has requested a key or, with `waiting`, a change of the key."""
        with self._changed:
            assert self._changed.wait_for(lambda: (key, waiting) in self.asked, timeout=30), self.asked

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        query = parse_qs(url.query)
        key = url.path.removeprefix(PREFIX)
        assert request.headers['Metadata-Flavor'] == 'Google'
        waiting = query.get('wait_for_change') == ['true']
        with self._changed:
            if self._faults:
                self._faults -= 1
                return
            self.asked.append((key, waiting))
            self._changed.notify_all()
            if waiting:
                seen = int(query['last_etag'][0])
                self._changed.wait_for(lambda: self._version > seen, timeout=float(query['timeout_sec'][0]))
            value, version = self._values.get(key), self._version
        request.send_response(404 if value is None else 200)
        request.send_header('ETag', str(version))
        request.send_header('Metadata-Flavor', self.flavor)
        request.end_headers()
        request.wfile.write((value or 'no').encode())
