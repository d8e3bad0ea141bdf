"""Runs a real server in a thread of the test process, on loopback and a free port."""

import asyncio
import contextlib
import json
import socket
import threading

import openai

from maxlm.serving.limits import ServerLimits
from maxlm.serving.server import Server, bind, server_url


class ServerThread:
    """Context manager whose server listens while it is entered.

    Attributes:
        url: URL of the server.
        running: the server.
        exit_code: exit code of `run`, once it has returned.
    """

    def __init__(self, served, *, limits=None, **settings):
        self.listener = bind('127.0.0.1', 0)
        self.url = server_url(self.listener)
        self.port = self.listener.getsockname()[1]
        self._ready = threading.Event()
        self.running = Server(
            served, limits or ServerLimits(drain_seconds=1), self.listener, on_ready=self._ready.set, **settings
        )
        self.exit_code = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        self.exit_code = self.loop.run_until_complete(self.running.run())
        self.loop.close()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_):
        self.stop()
        self.join()

    def stop(self):
        """Stops the server as a signal does."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.running.stop)

    def join(self):
        """Waits until the server has stopped."""
        self._thread.join(30)
        assert not self._thread.is_alive()

    def connect(self):
        """Returns a raw connection."""
        return socket.create_connection(('127.0.0.1', self.port), timeout=20)


def request_bytes(path, body, *, method='POST', headers=()):
    """Returns the bytes of a request."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f'{method} {path} HTTP/1.1', 'Host: 127.0.0.1', 'Content-Type: application/json', *headers]
    return '\r\n'.join([*lines, f'Content-Length: {len(body)}', '', '']).encode() + body


def client_of(server, api_key='none'):
    """Returns an OpenAI client of a server that sends each request once."""
    return openai.OpenAI(base_url=f'{server.url}/v1', api_key=api_key, max_retries=0)
