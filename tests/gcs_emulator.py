"""Google's storage on loopback as a process of its own, which is told over HTTP what is to go wrong with it.

    python -m tests.gcs_emulator BUCKET…      prints its port, and serves until it is ended

POST /_fault with the fields of `WireFault` plans a fault, DELETE /_fault ends them all; GET /_objects tells what is
stored (bucket/name → bytes), GET /_log what was asked. `Emulator` is this from the side of a test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.buckets.gcs import GcsServer, environment
from tests.buckets.gcs_api import ApiError, Handler, break_connection

ROOT = Path(__file__).parent.parent
FOREVER = 10**9


@dataclasses.dataclass
class WireFault:
    """What goes wrong with the next `times` requests of which `METHOD path?query`, unquoted, has a match.

    `status` is answered instead, if it is not 0; `drop` breaks the connection before anything is done, or `after` it
    was done and before it is told; `delay` are seconds that pass before.
    """

    match: str = ''
    times: int = FOREVER
    status: int = 0
    drop: str = ''
    delay: float = 0.0


class FaultyHandler(Handler):
    """The API, through a line that can fail."""

    def route(self, parts, body):
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
            raise ApiError(fault.status, f'planned: {fault.status}')
        else:
            self.silent = fault.drop == 'after'
            super().route(parts, body)

    # Whether the answer is kept back.
    silent = False

    def send(self, status, content, *rest):
        if self.silent:
            self.silent = False
            self.hang_up()
            return
        super().send(status, content, *rest)

    def hang_up(self):
        self.close_connection = True
        break_connection(self.connection)

    def take_fault(self):
        line = urllib.parse.unquote(f'{self.command} {self.path}')
        with self.store.lock:
            for fault in self.store.wire_faults:
                if fault.times > 0 and re.search(fault.match, line):
                    fault.times -= 1
                    return fault
        return None

    def control(self, what, body):
        with self.store.lock:
            match self.command, what:
                case 'POST', '_fault':
                    self.store.wire_faults.append(WireFault(**json.loads(body)))
                    facts = {}
                case 'DELETE', '_fault':
                    self.store.wire_faults.clear()
                    facts = {}
                case 'GET', '_objects':
                    facts = {f'{bucket}/{name}': len(s.content) for (bucket, name), s in self.store.objects.items()}
                case 'GET', '_log':
                    facts = [dataclasses.asdict(one) for one in self.store.requests if one.kind]
                case _:
                    raise ApiError(404, f'{self.command} /{what} is no control')
        self.send_json(facts)


class FaultyServer(GcsServer):
    handler = FaultyHandler

    def __init__(self):
        self.wire_faults: list[WireFault] = []
        super().__init__()


class Emulator:
    """The process. `environment` is what other processes need to take it for Google's."""

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

    def take_for_googles(self, monkeypatch):
        """This process does, and those that it starts."""
        import fsspec.config

        from maxlm.storage import object_store

        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        # The variable is read when fsspec is imported.
        monkeypatch.setitem(fsspec.config.conf, 'gcs', json.loads(self.environment['FSSPEC_GCS']))
        object_store._filesystem.cache_clear()

    def fault(self, match='', **facts):
        self._call('POST', '_fault', dataclasses.asdict(WireFault(match, **facts)))

    def clear(self):
        """Nothing goes wrong any more."""
        self._call('DELETE', '_fault')

    @property
    def objects(self) -> dict[str, int]:
        """bucket/name → bytes."""
        return self._call('GET', '_objects')

    @property
    def log(self) -> list[dict]:
        """The requests so far, oldest first; see `Request`."""
        return self._call('GET', '_log')

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _call(self, method, what, facts=None):
        body = None if facts is None else json.dumps(facts).encode()
        with urllib.request.urlopen(urllib.request.Request(f'{self.url}/{what}', body, method=method)) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def running(*buckets: str) -> Iterator[Emulator]:
    """The process, ended with the context."""
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
