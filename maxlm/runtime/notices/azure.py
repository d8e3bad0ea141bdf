"""Notices of Azure's Scheduled Events.

| type | shortest notice | action |
|---|---|---|
| Preempt | 30 s before a spot machine ends | stop |
| Terminate | set by the user, 5 to 15 minutes | stop |
| Reboot | 15 minutes | stop |
| Redeploy | 10 minutes | stop |
| Freeze | 15 minutes before the machine pauses for a few seconds | log only |

The response lists the events of all machines of a scale set or availability set. Events need not be acknowledged: an
acknowledgment only makes them start earlier. See https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from maxlm.runtime.notices.feed import Feed, Notice, as_object, parse_object, read_dmi, request

# Variable in which the SDKs of Azure accept another address of the metadata service.
ENDPOINT = 'AZURE_POD_IDENTITY_AUTHORITY_HOST'
DEFAULT_ENDPOINT = 'http://169.254.169.254'
# All machines of Azure have this asset tag. Other machines of Microsoft's hypervisor do not.
ASSET_TAG = '7783-7084-3265-9085-8269-3286-77'
EVENTS = 'scheduledevents?api-version=2020-07-01'
NAME = 'instance/compute/name?api-version=2021-02-01&format=text'
# Azure recommends this interval.
POLL_SECONDS = 1.0
# The first request enables Scheduled Events for the machine, which can take two minutes.
TIMEOUT_SECONDS = 150.0
STOPPING = {
    'Preempt': 'preemption notice',
    'Terminate': 'termination notice',
    'Reboot': 'maintenance notice (reboot)',
    'Redeploy': 'maintenance notice (move to another host)',
}


def read_events(value: str, name: str) -> list[Notice]:
    """Parses the events of the machine with this name."""
    notices = []
    events = parse_object(value).get('Events', [])
    if not isinstance(events, list):
        raise ValueError('Events must be a JSON list')
    for fields in map(as_object, events):
        names = fields.get('Resources', [])
        if not isinstance(names, list) or name.lower() not in (str(it).lower() for it in names):
            continue
        event, kind = str(fields.get('EventId', '')), str(fields.get('EventType', ''))
        # The time is empty if the event has started.
        start = f' for {fields.get("NotBefore")}' if fields.get('NotBefore') else ', has started'
        if kind in STOPPING:
            notices.append(Notice(event, f'{STOPPING[kind]}{start}', must_stop=True))
        elif kind == 'Freeze':
            message = f'notice of a pause of the machine{start}; training continues'
            notices.append(Notice(event, message, must_stop=False))
    return notices


class AzureFeed:
    """Feed of the scheduled events."""

    def __init__(self, endpoint: str):
        self._endpoint, self._machine = endpoint, ''
        self.name, self.delay = 'scheduledevents', POLL_SECONDS

    def poll(self) -> list[Notice]:
        """Returns the notices of this machine."""
        self._machine = self._machine or self._fetch(NAME)
        return read_events(self._fetch(EVENTS), self._machine)

    def _fetch(self, path: str) -> str:
        value, _ = request(f'{self._endpoint}/metadata/{path}', {'Metadata': 'true'}, timeout=TIMEOUT_SECONDS)
        return value


def metadata_endpoint(environment: Mapping[str, str]) -> str:
    """Returns the URL of the metadata service, or '' if the machine does not belong to Azure."""
    if environment.get(ENDPOINT):
        return environment[ENDPOINT].rstrip('/')
    return DEFAULT_ENDPOINT if read_dmi('chassis_asset_tag') == ASSET_TAG else ''


def azure_feeds(environment: Mapping[str, str] = os.environ) -> list[Feed]:
    """Returns the feeds of a machine of Azure, or [] on other machines."""
    endpoint = metadata_endpoint(environment)
    return [AzureFeed(endpoint)] if endpoint else []
