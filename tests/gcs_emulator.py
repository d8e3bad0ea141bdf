"""Google Cloud Storage emulator as a separate process, with faults that tests inject over HTTP.

    python -m tests.gcs_emulator BUCKET…      prints its port and serves until it is stopped

POST /_fault adds a fault with the fields of `WireFault`; DELETE /_fault removes all faults. GET /_objects returns the
sizes of stored objects by bucket/name, GET /_log the requests. Tests use the client class `Emulator`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
import subprocess
import sys
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.buckets.gcs import GcsServer, environment
from tests.buckets.gcs_api import ApiError, Handler, break_connection

ROOT = Path(__file__).parent.parent
FOREVER = 10**9
PAGE = b'<html><body>Please log in.</body></html>'
# Number of bytes that are sent slowly.
DRIPS = 10


@dataclasses.dataclass
class WireFault:
    """A fault in `times` requests, after the first `skip` ones, whose unquoted `METHOD path?query` matches a pattern.

    A nonzero `status` replaces the response. `drop` breaks the connection `before` the request is executed, or `after`
    the execution but before the response. `delay` is the delay in seconds. `answer` replaces the response:

    - `html`: a page with status 200, as from the login of a network.
    - `redirect`: a redirect to such a page.
    - `truncate`: the connection is closed in the middle of the body.
    - `short`: the first half of the body with a matching length.
    - `flip`: a bit in the middle of the body is flipped.
    - `drip`: one byte at a time, for a second.
    - `stale`: the objects when the fault was added.
    - `damage`: a bit of an uploaded body is flipped before it is stored.
    """

    match: str = ''
    times: int = FOREVER
    skip: int = 0
    answer: str = ''
    status: int = 0
    drop: str = ''
    delay: float = 0.0


def flipped(content: bytes) -> bytes:
    """Returns the content with one flipped bit."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else content


class FaultyHandler(Handler):
    """API handler with a faulty connection."""

    def route(self, parts, body):
        if parts[0] == '_login':
            self.send(200, PAGE, {'Content-Type': 'text/html'})
            return
        if parts[0].startswith('_'):
            self.control(parts[0], body)
            return
        fault = self.take_fault()
        if fault is None:
            super().route(parts, body)
            return
        time.sleep(fault.delay)
        if fault.drop == 'before':
            self.hang_up()
        elif fault.status:
            raise ApiError(fault.status, f'injected: {fault.status}')
        elif fault.answer == 'html':
            self.send(200, PAGE, {'Content-Type': 'text/html'})
        elif fault.answer == 'redirect':
            self.send(302, b'', {'Location': f'{self.store.url}/_login'})
        elif fault.answer == 'stale':
            self.store = copy.copy(self.store)
            self.store.objects = self.store.snapshots[id(fault)]
            super().route(parts, body)
            del self.store
        elif fault.answer == 'damage':
            super().route(parts, flipped(body))
        else:
            self.silent, self.change = fault.drop == 'after', fault.answer
            super().route(parts, body)

    # True if the response is withheld.
    silent = False
    # Change of the response.
    change = ''

    def send(self, status, content, headers=types.MappingProxyType({}), fault=None):
        change, self.change = self.change, ''
        if self.silent:
            self.silent = False
            self.hang_up()
        elif change == 'drip':
            self.drip(status, content, headers)
        else:
            content = {'short': content[: len(content) // 2], 'flip': flipped(content)}.get(change, content)
            super().send(status, content, headers, 'truncate' if change == 'truncate' else fault)

    def drip(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        for index in range(min(len(content), DRIPS)):
            self.wfile.write(content[index : index + 1])
            self.wfile.flush()
            time.sleep(1 / DRIPS)
        self.wfile.write(content[DRIPS:])

    def hang_up(self):
        self.close_connection = True
        break_connection(self.connection)

    def take_fault(self):
        line = urllib.parse.unquote(f'{self.command} {self.path}')
        with self.store.lock:
            for fault in self.store.wire_faults:
                if fault.times > 0 and re.search(fault.match, line):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    self.store.num_injected += 1
                    return fault
        return None

    def control(self, name, body):
        with self.store.lock:
            match self.command, name:
                case 'POST', '_fault':
                    self.store.inject(WireFault(**json.loads(body)))
                    facts = {}
                case 'DELETE', '_fault':
                    self.store.wire_faults.clear()
                    facts = {}
                case 'GET', '_objects':
                    facts = {f'{bucket}/{name}': len(s.content) for (bucket, name), s in self.store.objects.items()}
                case 'GET', '_log':
                    facts = [dataclasses.asdict(request) for request in self.store.requests if request.kind]
                case _:
                    raise ApiError(404, f'{self.command} /{name}: unknown endpoint')
        self.send_json(facts)


class FaultyServer(GcsServer):
    handler = FaultyHandler

    def __init__(self):
        self.wire_faults: list[WireFault] = []
        # Number of requests with a fault.
        self.num_injected = 0
        # Objects at the time of each `stale` fault.
        self.snapshots: dict[int, dict] = {}
        super().__init__()

    def inject(self, fault: WireFault):
        with self.lock:
            self.wire_faults.append(fault)
            self.snapshots[id(fault)] = dict(self.objects)


class Emulator:
    """Client of the emulator process. Processes with `environment` use it instead of Google's servers."""

    def __init__(self, *buckets: str):
        command = [sys.executable, '-m', 'tests.gcs_emulator', *buckets]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.url = f'http://127.0.0.1:{int(self._process.stdout.readline())}'
        self.environment = {
            **environment(self),
            'CLOUD_STORAGE_EMULATOR_ENDPOINT': self.url,
            'EPATH_USE_TF': 'false',
            'FSSPEC_GCS': '{"token": "anon", "use_listings_cache": false}',
        }

    def patch_environment(self, monkeypatch):
        """Makes this process and its children use the emulator instead of Google's servers."""
        import fsspec.config

        from maxlm.storage import object_store

        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        # fsspec reads the variable at import.
        monkeypatch.setitem(fsspec.config.conf, 'gcs', json.loads(self.environment['FSSPEC_GCS']))
        object_store._filesystem.cache_clear()

    def fault(self, match='', **facts):
        self._call('POST', '_fault', dataclasses.asdict(WireFault(match, **facts)))

    def clear(self):
        """Removes all faults."""
        self._call('DELETE', '_fault')

    @property
    def objects(self) -> dict[str, int]:
        """Returns the size of each object by bucket/name."""
        return self._call('GET', '_objects')

    @property
    def log(self) -> list[dict]:
        """Returns the requests so far, oldest first; see `Request`."""
        return self._call('GET', '_log')

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _call(self, method, path, facts=None):
        body = None if facts is None else json.dumps(facts).encode()
        with urllib.request.urlopen(urllib.request.Request(f'{self.url}/{path}', body, method=method)) as response:
            return json.loads(response.read())


@contextlib.contextmanager
def running(*buckets: str) -> Iterator[Emulator]:
    """Yields the emulator and stops its process at the end."""
    emulator = Emulator(*buckets)
    try:
        yield emulator
    finally:
        emulator.stop()


def main(buckets):
    server = FaultyServer()
    server.buckets.update(buckets)
    print(server.port, flush=True)
    while True:
        time.sleep(3600)


if __name__ == '__main__':
    main(sys.argv[1:])
