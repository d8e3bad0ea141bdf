"""Tests notices of Azure from a server on loopback: stops, warnings and events of other machines."""

import json

import pytest

from maxlm.runtime.notices import azure
from maxlm.runtime.notices.azure import azure_feeds, metadata_endpoint, read_events
from tests.runtime.notices.metadata_servers import AzureServer

EVENTS = '/metadata/scheduledevents'
TIME = 'Mon, 19 Sep 2026 18:29:47 GMT'


def events(*kinds, machine='trainer_3', time=TIME):
    return json.dumps(
        {
            'DocumentIncarnation': 1,
            'Events': [
                {
                    'EventId': f'id-{kind}',
                    'EventType': kind,
                    'ResourceType': 'VirtualMachine',
                    'Resources': ['other_1', machine],
                    'EventStatus': 'Scheduled' if time else 'Started',
                    'NotBefore': time,
                }
                for kind in kinds
            ],
        }
    )


@pytest.fixture
def server():
    with AzureServer({'name': 'trainer_3', 'events': events()}) as server:
        yield server


def start(watch, server):
    return watch(azure_feeds({azure.ENDPOINT: f'{server.url}/'}))


@pytest.mark.parametrize(
    ('kind', 'expected'),
    [
        ('Preempt', ('stop', f'preemption notice for {TIME}')),
        ('Terminate', ('stop', f'termination notice for {TIME}')),
        ('Reboot', ('stop', f'maintenance notice (reboot) for {TIME}')),
        ('Redeploy', ('stop', f'maintenance notice (move to another host) for {TIME}')),
        ('Freeze', ('warn', f'notice of a pause of the machine for {TIME}; training continues')),
    ],
)
def test_new_event_is_reported_once(watch, server, kind, expected):
    calls = start(watch, server)
    server.wait_for_requests(EVENTS)
    server.values['events'] = events(kind)
    assert calls.next() == expected
    # The same event without a time has started.
    server.values['events'] = events(kind, time='')
    server.wait_for_requests(EVENTS)
    assert calls.is_empty()


def test_event_before_startup_only_warns(watch, server):
    server.values['events'] = events('Reboot')
    calls = start(watch, server)
    kind, text = calls.next()
    assert (kind, 'predates this start' in text) == ('warn', True)
    server.values['events'] = events('Reboot', 'Preempt')
    assert calls.next()[0] == 'stop'


def test_events_of_other_machines_are_ignored(watch, server):
    calls = start(watch, server)
    server.wait_for_requests(EVENTS)
    server.values['events'] = events('Preempt', machine='trainer_30')
    server.wait_for_requests(EVENTS)
    assert calls.is_empty()
    # Azure compares names without regard to case.
    server.values['events'] = events('Preempt', machine='Trainer_3')
    assert calls.next()[0] == 'stop'


def test_throttled_requests_are_retried(watch, server):
    calls = start(watch, server)
    server.wait_for_requests(EVENTS)
    server.status = 429
    server.values['events'] = events('Preempt')
    server.wait_for_requests(EVENTS)
    assert calls.is_empty()
    server.status = 0
    assert calls.next()[0] == 'stop'


def test_invalid_and_unknown_events():
    for text in ('', '[]', '{"Events": {}}', '{"Events": [1]}'):
        with pytest.raises(ValueError):
            read_events(text, 'trainer_3')
    assert read_events('{}', 'trainer_3') == []
    assert read_events(events('Migrate'), 'trainer_3') == []
    assert read_events('{"Events": [{"EventType": "Preempt"}]}', 'trainer_3') == []


def test_detection(dmi):
    tag = dmi / 'chassis_asset_tag'
    assert metadata_endpoint({}) == ''
    tag.write_text('None\n')
    assert azure_feeds({}) == []
    tag.write_text(f'{azure.ASSET_TAG}\n')
    assert metadata_endpoint({}) == 'http://169.254.169.254'
    assert metadata_endpoint({azure.ENDPOINT: 'http://localhost:1/'}) == 'http://localhost:1'
