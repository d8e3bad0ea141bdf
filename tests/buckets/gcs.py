"""Google Cloud Storage emulator on loopback with fault injection, for file systems and checkpoints.

Implements a part of https://cloud.google.com/storage/docs/json_api/v1: buckets (insert, get), objects (list, get, get
media with ranges, delete, insert by simple, multipart and resumable upload), generations and preconditions.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import socket
import threading
import types
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import google_crc32c

from tests.buckets.gcs_api import Handler, Request, break_connection

UPDATED = '2026-01-01T00:00:00.000000Z'


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    content: bytes
    generation: int
    content_type: str = 'application/octet-stream'
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    # Composite objects have no MD5.
    composed: bool = False

    @property
    def resource(self):
        facts = {
            'kind': 'storage#object',
            'id': f'{self.bucket}/{self.name}/{self.generation}',
            'name': self.name,
            'bucket': self.bucket,
            'generation': str(self.generation),
            'metageneration': '1',
            'size': str(len(self.content)),
            'contentType': self.content_type,
            'timeCreated': UPDATED,
            'updated': UPDATED,
            'etag': f'etag-{self.generation}',
            'crc32c': self.crc32c,
            'metadata': self.metadata,
        }
        return facts if self.composed else {**facts, 'md5Hash': self.md5}

    @functools.cached_property
    def md5(self):
        return base64.b64encode(hashlib.md5(self.content).digest()).decode()

    @functools.cached_property
    def crc32c(self):
        return base64.b64encode(google_crc32c.Checksum(self.content).digest()).decode()


@dataclasses.dataclass
class Fault:
    """A fault in the next `times` requests of a kind for objects with matching names.

    `kind` is a status (403, 503, …). For media it can also be `reset` (connection reset in the middle of the body),
    `truncate` (connection closed there), `flip` (last bit flipped) or `hold` (paused until `released` is set).
    """

    kind: int | str
    match: str = '*'
    requests: str = 'media'
    times: int = 10**9
    released: threading.Event = dataclasses.field(default_factory=threading.Event)
    # Set when a request is paused.
    reached: threading.Event = dataclasses.field(default_factory=threading.Event)


class GcsServer:
    """The emulator. Tests may read and change its attributes at any time."""

    handler = Handler

    def __init__(self):
        self.lock = threading.RLock()
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.uploads: dict[str, dict] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.connections: set[socket.socket] = set()
        self.generations = itertools.count(1000)
        self.page_size = 1000
        self.port = 0
        self._http: ThreadingHTTPServer | None = None
        self.appear()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.port}'

    def put(self, bucket, name, content, **facts):
        with self.lock:
            self.buckets.add(bucket)
            stored = StoredObject(bucket, name, content, next(self.generations), **facts)
            self.objects[bucket, name] = stored
            return stored

    def asked(self, kind='media', match='*'):
        """Returns the previous requests of a kind for objects with matching names."""
        with self.lock:
            requests = [request for request in self.requests if request.kind == kind]
            return [request for request in requests if fnmatch.fnmatch(request.name, match)]

    def fault(self, kind, match='*', **facts):
        fault = Fault(kind, match, **facts)
        with self.lock:
            self.faults.append(fault)
        return fault

    def vanish(self):
        """Stops listening and resets open connections."""
        if self._http is None:
            return
        http, self._http = self._http, None
        http.shutdown()
        http.server_close()
        with self.lock:
            for connection in list(self.connections):
                break_connection(connection)

    def appear(self):
        """Listens again on the same port."""
        self._http = Listener(('127.0.0.1', self.port), type('BoundHandler', (self.handler,), {'store': self}))
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()

    def close(self):
        for fault in self.faults:
            fault.released.set()
        self.vanish()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Ignores errors of closed connections."""


def environment(server: GcsServer) -> dict[str, str]:
    """Returns the environment with which gcsfs and TensorStore use the emulator."""
    return {
        'STORAGE_EMULATOR_HOST': server.url,
        'TENSORSTORE_GCS_HTTP_URL': server.url,
        'FSSPEC_GCS': '{"token": "anon"}',
        'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
        'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'abc',
        'NO_GCE_CHECK': 'true',
    }


@contextlib.contextmanager
def running(monkeypatch, kind=GcsServer) -> Iterator[GcsServer]:
    """Yields the emulator, which this process uses instead of Google's servers; gcsfs retries without sleeping."""
    import asyncio

    import fsspec.config
    import gcsfs.retry

    from maxlm.storage import object_store

    server = kind()
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    # fsspec reads the variable at import.
    monkeypatch.setitem(fsspec.config.conf, 'gcs', {'token': 'anon'})
    monkeypatch.setattr(gcsfs.retry, 'asyncio', types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0)))
    object_store._filesystem.cache_clear()
    try:
        yield server
    finally:
        server.close()
        object_store._filesystem.cache_clear()
