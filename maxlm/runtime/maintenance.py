"""Maintenance events and preemption notices of Google Cloud, from its metadata server.

| key of the instance | says | what follows |
|---|---|---|
| `preempted` | TRUE about 30 s before a spot machine ends | stop |
| `maintenance-event` | TERMINATE_ON_HOST_MAINTENANCE from a minute to an hour ahead | stop |
| | MIGRATE_ON_HOST_MAINTENANCE | nothing: the machine goes on elsewhere |
| `upcoming-maintenance` | that of TPUs: PENDING, days ahead, with its time | it is logged |
| | ONGOING | stop |

Only news count: a run that is started under a notice goes on until a signal ends it, or it would be stopped and started
over and over until the machine is gone.
"""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from maxlm.log import logger
from maxlm.storage.json_text import parse_json

# The variables that Google's own libraries read.
HOST, NOT_ON_GCE = 'GCE_METADATA_HOST', 'NO_GCE_CHECK'
DEFAULT_HOST = 'metadata.google.internal'
PRODUCT_NAME = Path('/sys/class/dmi/id/product_name')
# The server holds a question that long for an answer that has changed.
WAIT_SECONDS = 60
# After an answer that is none; doubled up to the second.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class MaintenanceEvent(NamedTuple):
    """What follows from a key's new value: words for the log, and whether to stop."""

    message: str
    must_stop: bool


def read_preempted(value: str) -> MaintenanceEvent | None:
    """Of `preempted`."""
    return MaintenanceEvent('notice of preemption', must_stop=True) if value.upper() == 'TRUE' else None


def read_maintenance(value: str) -> MaintenanceEvent | None:
    """Of `maintenance-event`."""
    if value.startswith('TERMINATE'):
        return MaintenanceEvent(f'notice of maintenance ({value})', must_stop=True)
    if value.startswith('MIGRATE'):
        return MaintenanceEvent(f'the machine is about to be moved ({value}); going on', must_stop=False)
    return None


def read_upcoming(value: str) -> MaintenanceEvent | None:
    """Of `upcoming-maintenance`, an object in JSON."""
    try:
        fields = parse_json(value)
    except ValueError:
        return None
    fields = (
        {key.lower().replace('_', ''): str(text) for key, text in fields.items()} if isinstance(fields, dict) else {}
    )
    status = fields.get('maintenancestatus', '')
    if status == 'ONGOING':
        return MaintenanceEvent('maintenance of the machine has begun', must_stop=True)
    if status == 'PENDING':
        return MaintenanceEvent(
            f'maintenance is due from {fields.get("windowstarttime", "an unknown time")} on', must_stop=False
        )
    return None


READERS: dict[str, Callable[[str], MaintenanceEvent | None]] = {
    'preempted': read_preempted,
    'maintenance-event': read_maintenance,
    'upcoming-maintenance?alt=json': read_upcoming,
}


def metadata_host(environment: Mapping[str, str] = os.environ) -> str:
    """Where the metadata server is; '' on a machine that is not of Google Cloud."""
    if environment.get(HOST):
        return environment[HOST]
    if environment.get(NOT_ON_GCE, '').lower() == 'true':
        return ''
    try:
        # Asked here and not of the network, where the name may lead anywhere.
        return DEFAULT_HOST if PRODUCT_NAME.read_text(encoding='utf-8').startswith('Google') else ''
    except OSError:
        return ''


class MaintenanceWatcher:
    """While entered, threads wait for notices. Does nothing where there is no metadata server.

    Neither a server that fails nor one that is silent disturbs the run.
    """

    def __init__(self, stop: Callable[[str], None], *, warn: Callable[[str], None] = logger.warning, host: str = ''):
        """
        Args:
            stop: called with the words of a notice after which the run must stop, from a thread of its own.
            warn: called with the message of each other event.
            host: of the metadata server; '' = as `metadata_host` says.
        """
        self._stop, self._warn = stop, warn
        self._host = host or metadata_host()
        self._closed = threading.Event()
        # The machine's own network, which no proxy reaches.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> MaintenanceWatcher:
        if self._host:
            for key in READERS:
                # Not waited for at the end: each may be in the middle of a long question.
                threading.Thread(target=self._watch, args=(key,), daemon=True, name=f'notices-{key}').start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _watch(self, key: str) -> None:
        tag, previous, pause = '', None, RETRY_SECONDS
        while not self._closed.is_set():
            try:
                tag, value = self._fetch(key, tag)
                pause = RETRY_SECONDS
            except urllib.error.HTTPError as error:
                # 404 and 503 are how it says that there is no notice.
                error.close()
                tag, value = '', ''
            except (OSError, http.client.HTTPException, ValueError):
                self._closed.wait(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)
                continue
            if self._closed.is_set():
                return
            event = READERS[key](value)
            if event and value != previous:
                if previous is None and event.must_stop:
                    self._warn(f'{event.message}, from before this start: going on until a signal comes')
                elif event.must_stop:
                    self._stop(event.message)
                else:
                    self._warn(event.message)
            previous = value
            if not tag:
                # The server has not waited.
                self._closed.wait(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)

    def _fetch(self, key: str, tag: str) -> tuple[str, str]:
        """Waits for a value that is not the one of `tag`; returns the new one's tag and the value."""
        path, _, query = key.partition('?')
        words = urllib.parse.parse_qsl(query)
        if tag:
            words += [('wait_for_change', 'true'), ('last_etag', tag), ('timeout_sec', str(WAIT_SECONDS))]
        url = f'http://{self._host}/computeMetadata/v1/instance/{path}?{urllib.parse.urlencode(words)}'
        request = urllib.request.Request(url, headers={'Metadata-Flavor': 'Google'})
        with self._opener.open(request, timeout=2 * WAIT_SECONDS) as answer:
            if answer.headers.get('Metadata-Flavor') != 'Google':
                # Whoever answers, it is not that server.
                raise ValueError
            return answer.headers.get('ETag', ''), answer.read(65536).decode('utf-8', 'replace').strip()
