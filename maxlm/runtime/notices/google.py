"""Notices of Google Cloud's metadata server.

| key of the instance | value | action |
|---|---|---|
| `preempted` | TRUE about 30 s before a spot machine ends | stop |
| `maintenance-event` | TERMINATE_ON_HOST_MAINTENANCE, from a minute to an hour ahead | stop |
| | MIGRATE_ON_HOST_MAINTENANCE | log only: the machine migrates |
| `upcoming-maintenance` | PENDING (TPUs), days ahead, with its time | log only |
| | ONGOING | stop |
"""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
from collections.abc import Callable, Mapping

from maxlm.runtime.notices import feed
from maxlm.runtime.notices.feed import Feed, Notice, parse_object, read_dmi, request

# Variables that Google's own libraries read.
HOST, NOT_ON_GCE = 'GCE_METADATA_HOST', 'NO_GCE_CHECK'
DEFAULT_HOST = 'metadata.google.internal'
# The server delays a response for up to this long until the value changes.
WAIT_SECONDS = 60


def read_preempted(value: str) -> Notice | None:
    """Parses the value of `preempted`."""
    return Notice(value, 'preemption notice', must_stop=True) if value.upper() == 'TRUE' else None


def read_maintenance(value: str) -> Notice | None:
    """Parses the value of `maintenance-event`."""
    if value.startswith('TERMINATE'):
        return Notice(value, f'maintenance notice ({value})', must_stop=True)
    if value.startswith('MIGRATE'):
        return Notice(value, f'live migration notice ({value}); training continues', must_stop=False)
    return None


def read_upcoming(value: str) -> Notice | None:
    """Parses the value of `upcoming-maintenance`, a JSON object."""
    try:
        fields = {key.lower().replace('_', ''): str(text) for key, text in parse_object(value).items()}
    except ValueError:
        return None
    status = fields.get('maintenancestatus', '')
    if status == 'ONGOING':
        return Notice(value, 'host maintenance has started', must_stop=True)
    if status == 'PENDING':
        start = fields.get('windowstarttime', 'an unknown time')
        return Notice(value, f'host maintenance is scheduled for {start}', must_stop=False)
    return None


READERS: dict[str, Callable[[str], Notice | None]] = {
    'preempted': read_preempted,
    'maintenance-event': read_maintenance,
    'upcoming-maintenance?alt=json': read_upcoming,
}


class GoogleFeed:
    """Feed of one key. Waits for a change of its value."""

    def __init__(self, host: str, key: str):
        self._host, self._read = host, READERS[key]
        self.name, _, query = key.partition('?')
        self._query = urllib.parse.parse_qsl(query)
        self._tag = ''
        self.delay = 0.0

    def poll(self) -> list[Notice]:
        """Waits until the value differs from the last one, and returns its notice."""
        try:
            self._tag, value = self._fetch()
        except urllib.error.HTTPError as error:
            # The server responds with 404 or 503 if there is no notice.
            error.close()
            self._tag, value = '', ''
        # Without an ETag the server responds immediately.
        self.delay = 0.0 if self._tag else min(max(2 * self.delay, feed.RETRY_SECONDS), feed.MAX_RETRY_SECONDS)
        notice = self._read(value)
        return [notice] if notice else []

    def _fetch(self) -> tuple[str, str]:
        """Returns the new ETag and value."""
        query = list(self._query)
        if self._tag:
            query += [('wait_for_change', 'true'), ('last_etag', self._tag), ('timeout_sec', str(WAIT_SECONDS))]
        url = f'http://{self._host}/computeMetadata/v1/instance/{self.name}?{urllib.parse.urlencode(query)}'
        value, headers = request(url, {'Metadata-Flavor': 'Google'}, timeout=2 * WAIT_SECONDS)
        if headers.get('Metadata-Flavor') != 'Google':
            raise ValueError('the header Metadata-Flavor of the response must be Google')
        return headers.get('ETag', ''), value


def metadata_host(environment: Mapping[str, str]) -> str:
    """Returns the host of the metadata server, or '' if the machine does not belong to Google Cloud."""
    if environment.get(HOST):
        return environment[HOST]
    if environment.get(NOT_ON_GCE, '').lower() == 'true':
        return ''
    return DEFAULT_HOST if read_dmi('product_name').startswith('Google') else ''


def google_feeds(environment: Mapping[str, str] = os.environ) -> list[Feed]:
    """Returns the feeds of a machine of Google Cloud, or [] on other machines."""
    host = metadata_host(environment)
    return [GoogleFeed(host, key) for key in READERS] if host else []
