"""Notices of the instance metadata service of Amazon EC2, version 2.

| path below `meta-data/` | value | action |
|---|---|---|
| `spot/instance-action` | action and time, two minutes before a spot machine ends | stop |
| `events/recommendations/rebalance` | time of a recommendation to move to another machine | log only |
| `events/maintenance/scheduled` | scheduled reboots, stops and retirements, days ahead | log; stop two minutes before |

A missing value is a response with 404. A rebalance recommendation only means a higher risk of a preemption, which often
does not follow. See https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-instances-status-check_sched.html.
"""

from __future__ import annotations

import email.utils
import os
import urllib.error
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from maxlm.runtime.notices.feed import Feed, Notice, as_object, parse_object, read_dmi, request
from maxlm.storage.json_text import parse_json

# Variables that the SDKs of AWS read.
ENDPOINT, ENDPOINT_MODE = 'AWS_EC2_METADATA_SERVICE_ENDPOINT', 'AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE'
DISABLED = 'AWS_EC2_METADATA_DISABLED'
IPV4_ENDPOINT, IPV6_ENDPOINT = 'http://169.254.169.254', 'http://[fd00:ec2::254]'
# AWS recommends this interval.
POLL_SECONDS = 5.0
# Local requests take milliseconds. Without an answer, the response exceeded the hop limit on its way to a container.
TIMEOUT_SECONDS = 5.0
TOKEN_SECONDS = 6 * 60 * 60
# Time to save before scheduled maintenance: the same as before a preemption.
LEAD_TIME = timedelta(minutes=2)


def read_instance_action(value: str) -> list[Notice]:
    """Parses the value of `spot/instance-action`."""
    fields = parse_object(value)
    action = f'{fields.get("action", "stop")} at {fields.get("time", "an unknown time")}'
    return [Notice(action, f'preemption notice ({action})', must_stop=True)]


def read_rebalance(value: str) -> list[Notice]:
    """Parses the value of `events/recommendations/rebalance`."""
    time = str(parse_object(value).get('noticeTime', ''))
    message = f'rebalance recommendation ({time}): a preemption is more likely; training continues'
    return [Notice(time, message, must_stop=False)]


def read_scheduled(value: str) -> list[Notice]:
    """Parses the value of `events/maintenance/scheduled`, a list of events. Those about to start must stop the run."""
    events = parse_json(value)
    if not isinstance(events, list):
        raise ValueError('the response must be a JSON list')
    notices = []
    for fields in map(as_object, events):
        start = str(fields.get('NotBefore', ''))
        notices.append(
            Notice(
                str(fields.get('EventId', start)),
                f'host maintenance ({fields.get("Code", "unknown type")}) is scheduled for {start}',
                must_stop=_is_imminent(start),
            )
        )
    return notices


def _is_imminent(start: str) -> bool:
    """Returns True if a time such as `21 Jan 2026 09:00:43 GMT` is near or past."""
    try:
        time = email.utils.parsedate_to_datetime(start).astimezone(UTC)
    except (ValueError, OverflowError):
        return False
    return time - datetime.now(UTC) <= LEAD_TIME


READERS: dict[str, Callable[[str], list[Notice]]] = {
    'spot/instance-action': read_instance_action,
    'events/recommendations/rebalance': read_rebalance,
    'events/maintenance/scheduled': read_scheduled,
}


class AwsFeed:
    """Feed of one path, which is requested with a session token."""

    def __init__(self, endpoint: str, path: str):
        self._endpoint, self._read = endpoint, READERS[path]
        self.name, self.delay = path, POLL_SECONDS
        self._token = ''

    def poll(self) -> list[Notice]:
        """Returns the notices of the path."""
        try:
            return self._read(self._fetch())
        except urllib.error.HTTPError as error:
            if error.code == 401:
                # The token has expired, or the machine has been resumed on another host.
                self._token = ''
            if error.code != 404:
                raise
            error.close()
            return []

    def _fetch(self) -> str:
        if not self._token:
            lifetime = {'X-aws-ec2-metadata-token-ttl-seconds': str(TOKEN_SECONDS)}
            self._token, _ = request(
                f'{self._endpoint}/latest/api/token', lifetime, timeout=TIMEOUT_SECONDS, method='PUT'
            )
        url = f'{self._endpoint}/latest/meta-data/{self.name}'
        value, _ = request(url, {'X-aws-ec2-metadata-token': self._token}, timeout=TIMEOUT_SECONDS)
        return value


def metadata_endpoint(environment: Mapping[str, str]) -> str:
    """Returns the URL of the metadata service, or '' if the machine does not belong to AWS."""
    if environment.get(DISABLED, '').lower() == 'true':
        return ''
    if environment.get(ENDPOINT):
        return environment[ENDPOINT].rstrip('/')
    # Machines of the older generation, such as P3, run on Xen and have a BIOS version such as 4.11.amazon.
    if not read_dmi('sys_vendor').startswith('Amazon') and 'amazon' not in read_dmi('bios_version').lower():
        return ''
    return IPV6_ENDPOINT if environment.get(ENDPOINT_MODE, '').lower() == 'ipv6' else IPV4_ENDPOINT


def aws_feeds(environment: Mapping[str, str] = os.environ) -> list[Feed]:
    """Returns the feeds of a machine of AWS, or [] on other machines."""
    endpoint = metadata_endpoint(environment)
    return [AwsFeed(endpoint, path) for path in READERS] if endpoint else []
