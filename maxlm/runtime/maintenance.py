"""Maintenance events and preemption notices from the metadata server of Google Cloud.

| key of the instance | value | action |
|---|---|---|
| `preempted` | TRUE about 30 s before a spot machine ends | stop |
| `maintenance-event` | TERMINATE_ON_HOST_MAINTENANCE, from a minute to an hour ahead | stop |
| | MIGRATE_ON_HOST_MAINTENANCE | log only: the machine migrates |
| `upcoming-maintenance` | PENDING (TPUs), days ahead, with its time | log only |
| | ONGOING | stop |

Only new events stop a run. A run that starts under a notice continues until a signal ends it. Otherwise it would be
stopped and restarted repeatedly until the machine ends.
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

# Variables that Google's own libraries read.
HOST, NOT_ON_GCE = 'GCE_METADATA_HOST', 'NO_GCE_CHECK'
DEFAULT_HOST = 'metadata.google.internal'
PRODUCT_NAME = Path('/sys/class/dmi/id/product_name')
# The server delays a response for up to this long until the value changes.
WAIT_SECONDS = 60
# Delay after a failed request, doubled up to the maximum.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class MaintenanceEvent(NamedTuple):
    """Event reported by the metadata server.

    Attributes:
        message: message for the log.
        must_stop: True if the run must stop.
    """

    message: str
    must_stop: bool


def read_preempted(value: str) -> MaintenanceEvent | None:
    """Parses the value of `preempted`."""
    return MaintenanceEvent('preemption notice', must_stop=True) if value.upper() == 'TRUE' else None


def read_maintenance(value: str) -> MaintenanceEvent | None:
    """Parses the value of `maintenance-event`."""
    if value.startswith('TERMINATE'):
        return MaintenanceEvent(f'maintenance notice ({value})', must_stop=True)
    if value.startswith('MIGRATE'):
        return MaintenanceEvent(f'live migration notice ({value}); training continues', must_stop=False)
    return None


def read_upcoming(value: str) -> MaintenanceEvent | None:
    """Parses the value of `upcoming-maintenance`, a JSON object."""
    try:
        fields = parse_json(value)
    except ValueError:
        return None
    fields = (
        {key.lower().replace('_', ''): str(text) for key, text in fields.items()} if isinstance(fields, dict) else {}
    )
    status = fields.get('maintenancestatus', '')
    if status == 'ONGOING':
        return MaintenanceEvent('host maintenance has started', must_stop=True)
    if status == 'PENDING':
        return MaintenanceEvent(
            f'host maintenance is scheduled for {fields.get("windowstarttime", "an unknown time")}', must_stop=False
        )
    return None


READERS: dict[str, Callable[[str], MaintenanceEvent | None]] = {
    'preempted': read_preempted,
    'maintenance-event': read_maintenance,
    'upcoming-maintenance?alt=json': read_upcoming,
}


def metadata_host(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the host of the metadata server, or '' if the machine does not belong to Google Cloud."""
    if environment.get(HOST):
        return environment[HOST]
    if environment.get(NOT_ON_GCE, '').lower() == 'true':
        return ''
    try:
        # Read the local product name instead of querying the network, where the host name may resolve to anything.
        return DEFAULT_HOST if PRODUCT_NAME.read_text(encoding='utf-8').startswith('Google') else ''
    except OSError:
        return ''


class MaintenanceWatcher:
    """Context in which threads wait for maintenance events. Does nothing without a metadata server.

    A failing or silent server does not affect the run.
    """

    def __init__(self, stop: Callable[[str], None], *, warn: Callable[[str], None] = logger.warning, host: str = ''):
        """
        Args:
            stop: called from a background thread with the message of an event that must stop the run.
            warn: called with the message of each other event.
            host: host of the metadata server; '' = result of `metadata_host`.
        """
        self._stop, self._warn = stop, warn
        self._host = host or metadata_host()
        self._closed = threading.Event()
        # The metadata server is on the machine's own network, where proxies do not apply.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> MaintenanceWatcher:
        if self._host:
            for key in READERS:
                # Daemon threads that are not joined, because each may wait for a long response.
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
                # The server responds with 404 or 503 if there is no notice.
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
                    self._warn(
                        f'{event.message}: the notice predates this start; training continues until a signal arrives'
                    )
                elif event.must_stop:
                    self._stop(event.message)
                else:
                    self._warn(event.message)
            previous = value
            if not tag:
                # Without an ETag the server responds immediately, so wait here.
                self._closed.wait(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)

    def _fetch(self, key: str, tag: str) -> tuple[str, str]:
        """Waits until the value differs from the one of `tag`. Returns the new ETag and value."""
        path, _, query = key.partition('?')
        words = urllib.parse.parse_qsl(query)
        if tag:
            words += [('wait_for_change', 'true'), ('last_etag', tag), ('timeout_sec', str(WAIT_SECONDS))]
        url = f'http://{self._host}/computeMetadata/v1/instance/{path}?{urllib.parse.urlencode(words)}'
        request = urllib.request.Request(url, headers={'Metadata-Flavor': 'Google'})
        with self._opener.open(request, timeout=2 * WAIT_SECONDS) as answer:
            if answer.headers.get('Metadata-Flavor') != 'Google':
                # Another server answered.
                raise ValueError
            return answer.headers.get('ETag', ''), answer.read(65536).decode('utf-8', 'replace').strip()
