"""Tests notices of Google Cloud from a server on loopback: stops, warnings and server failures."""

import json

import pytest

from maxlm.runtime.notices.google import (
    google_feeds,
    metadata_host,
    read_maintenance,
    read_preempted,
    read_upcoming,
)
from tests.checkpoint.metadata import MetadataServer

TERMINATE = 'TERMINATE_ON_HOST_MAINTENANCE'


def feeds_of(server):
    return google_feeds({'GCE_METADATA_HOST': server.host})


def upcoming(status):
    return json.dumps({'maintenance_status': status, 'window_start_time': '2026-01-02T03:04:05Z'})


@pytest.mark.parametrize(
    ('key', 'initial', 'notice', 'expected'),
    [
        ('preempted', 'FALSE', 'TRUE', ('stop', 'preemption notice')),
        ('maintenance-event', 'NONE', TERMINATE, ('stop', f'maintenance notice ({TERMINATE})')),
        ('maintenance-event', 'NONE', 'MIGRATE_ON_HOST_MAINTENANCE', ('warn', 'live migration notice')),
        ('upcoming-maintenance', '{}', upcoming('PENDING'), ('warn', 'scheduled for 2026-01-02T03:04:05Z')),
        ('upcoming-maintenance', upcoming('PENDING'), upcoming('ONGOING'), ('stop', 'has started')),
    ],
)
def test_changed_notice_is_reported_once(watch, key, initial, notice, expected):
    name = key.replace('-', '_')
    with MetadataServer(**{name: initial}) as server:
        calls = watch(feeds_of(server))
        server.wait_until_asked(key, waiting=True)
        if 'PENDING' in initial:
            assert calls.next()[0] == 'warn'
        assert calls.is_empty()
        server.set(**{name: notice})
        kind, text = calls.next()
        assert (kind, expected[1] in text) == (expected[0], True), text
        # The event is reported once, although the server is queried again.
        server.set(other='1')
        server.wait_until_asked(key, waiting=True)
        assert calls.is_empty()


def test_notice_before_startup_only_warns(watch):
    with MetadataServer(maintenance_event=TERMINATE) as server:
        calls = watch(feeds_of(server))
        kind, text = calls.next()
        assert (kind, 'predates this start' in text) == ('warn', True)
        # The next event is reported.
        server.wait_until_asked('maintenance-event', waiting=True)
        server.set(preempted='FALSE', maintenance_event='NONE')
        server.set(maintenance_event='TERMINATE')
        assert calls.next()[0] == 'stop'


def test_notice_of_a_new_key_is_reported(watch):
    with MetadataServer() as server:
        calls = watch(feeds_of(server))
        server.wait_until_asked('upcoming-maintenance', waiting=False)
        server.set(upcoming_maintenance=upcoming('ONGOING'))
        assert calls.next()[0] == 'stop'


def test_truncated_responses_are_retried(watch):
    with MetadataServer(preempted='FALSE', maintenance_event='NONE', upcoming_maintenance='{}') as server:
        server.fail(10)
        calls = watch(feeds_of(server))
        server.wait_until_asked('preempted', waiting=True)
        server.set(preempted='TRUE')
        assert calls.next() == ('stop', 'preemption notice')


def test_responses_of_other_servers_are_ignored(watch):
    with MetadataServer(preempted='FALSE') as server:
        server.flavor = 'Portal'
        calls = watch(feeds_of(server))
        server.wait_until_asked('preempted', waiting=False)
        server.set(preempted='TRUE')
        for _ in range(3):
            server.asked.clear()
            server.wait_until_asked('preempted', waiting=False)
        assert calls.is_empty()


@pytest.mark.parametrize(
    ('read', 'value'),
    [
        (read_preempted, 'FALSE'),
        (read_preempted, ''),
        (read_maintenance, 'NONE'),
        (read_upcoming, '{"error": "no notifications have been received yet, try again later"}'),
        (read_upcoming, '{"maintenanceStatus": "DONE"}'),
        (read_upcoming, '[1]'),
        (read_upcoming, 'no'),
    ],
)
def test_no_notice(read, value):
    assert read(value) is None


def test_detection(dmi):
    product = dmi / 'product_name'
    assert metadata_host({}) == ''
    product.write_text('Standard PC\n')
    assert metadata_host({}) == ''
    assert google_feeds({}) == []
    product.write_text('Google Compute Engine\n')
    assert metadata_host({}) == 'metadata.google.internal'
    assert metadata_host({'NO_GCE_CHECK': 'true'}) == ''
    assert metadata_host({'GCE_METADATA_HOST': 'localhost:1', 'NO_GCE_CHECK': 'true'}) == 'localhost:1'
