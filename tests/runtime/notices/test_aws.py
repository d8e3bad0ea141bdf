"""Tests notices of AWS from a server on loopback: stops, warnings, session tokens and server failures."""

import email.utils
import json
from datetime import UTC, datetime, timedelta

import pytest

from maxlm.runtime.notices import aws
from maxlm.runtime.notices.aws import IPV4_ENDPOINT, IPV6_ENDPOINT, aws_feeds, metadata_endpoint, read_scheduled
from tests.runtime.notices.metadata_servers import AwsServer

ACTION, REBALANCE, SCHEDULED = (
    'spot/instance-action',
    'events/recommendations/rebalance',
    'events/maintenance/scheduled',
)
TERMINATE = '{"action": "terminate", "time": "2026-01-02T03:04:05Z"}'


def path_of(name):
    return f'/latest/meta-data/{name}'


def feeds_of(server):
    return aws_feeds({'AWS_EC2_METADATA_SERVICE_ENDPOINT': f'{server.url}/'})


def scheduled(delay, *, event='instance-event-1', code='system-reboot'):
    time = email.utils.format_datetime(datetime.now(UTC) + delay, usegmt=True)
    # AWS omits the day of the week.
    return json.dumps([{'Code': code, 'EventId': event, 'NotBefore': time.split(', ')[1], 'State': 'active'}])


FAR, NEAR = timedelta(days=7), timedelta(minutes=1)


@pytest.mark.parametrize(
    ('path', 'initial', 'notice', 'expected'),
    [
        (ACTION, None, TERMINATE, ('stop', 'preemption notice (terminate at 2026-01-02T03:04:05Z)')),
        (ACTION, None, '{"action": "stop", "time": "2026-01-02T03:04:05Z"}', ('stop', 'preemption notice (stop at')),
        (REBALANCE, None, '{"noticeTime": "2026-01-02T03:04:05Z"}', ('warn', 'training continues')),
        (SCHEDULED, '[]', scheduled(FAR), ('warn', 'host maintenance (system-reboot) is scheduled for')),
        (SCHEDULED, scheduled(FAR), scheduled(NEAR), ('stop', 'host maintenance (system-reboot)')),
    ],
)
def test_changed_notice_is_reported_once(watch, path, initial, notice, expected):
    with AwsServer({path: initial} if initial else {}) as server:
        calls = watch(feeds_of(server))
        server.wait_for_requests(path_of(path))
        if initial and initial != '[]':
            assert calls.next()[0] == 'warn'
        assert calls.is_empty()
        server.values[path] = notice
        kind, text = calls.next()
        assert (kind, expected[1] in text) == (expected[0], True), text
        # The event is reported once, although the server is queried again.
        server.wait_for_requests(path_of(path))
        assert calls.is_empty()


def test_notice_before_startup_only_warns(watch):
    with AwsServer({ACTION: TERMINATE, SCHEDULED: scheduled(NEAR)}) as server:
        calls = watch(feeds_of(server))
        for _ in range(2):
            kind, text = calls.next()
            assert (kind, 'predates this start' in text) == ('warn', True)
        # The next events are reported.
        server.values[ACTION] = TERMINATE.replace('03:04', '04:04')
        assert calls.next()[0] == 'stop'
        server.values[SCHEDULED] = scheduled(NEAR, event='instance-event-2')
        assert calls.next()[0] == 'stop'


def test_the_time_decides_whether_maintenance_stops_the_run():
    stops = [read_scheduled(scheduled(delay))[0].must_stop for delay in (FAR, 3 * NEAR, NEAR, -NEAR)]
    assert stops == [False, False, True, True]
    [notice] = read_scheduled('[{"Code": "instance-stop", "NotBefore": "soon"}]')
    assert not notice.must_stop


def test_expired_tokens_are_replaced(watch):
    with AwsServer() as server:
        calls = watch(feeds_of(server))
        server.wait_for_requests(path_of(ACTION))
        tokens = server.requests['/latest/api/token']
        server.wait_for_requests(path_of(ACTION))
        # One token per feed serves many requests.
        assert server.requests['/latest/api/token'] == tokens <= 3
        server.expire()
        server.values[ACTION] = TERMINATE
        assert calls.next()[0] == 'stop'
        assert server.requests['/latest/api/token'] > tokens


def test_invalid_responses_are_retried(watch):
    with AwsServer() as server:
        calls = watch(feeds_of(server))
        server.wait_for_requests(path_of(ACTION))
        for text in ('', 'terminate', '[]', '{'):
            server.values[ACTION] = text
            server.wait_for_requests(path_of(ACTION))
        assert calls.is_empty()
        server.values[ACTION] = TERMINATE
        assert calls.next()[0] == 'stop'


def test_proxies_are_not_used(watch, monkeypatch):
    # Nothing listens on this port.
    monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
    monkeypatch.delenv('no_proxy', raising=False)
    with AwsServer() as server:
        watch(feeds_of(server))
        server.wait_for_requests(path_of(ACTION))


def test_detection(dmi):
    assert metadata_endpoint({}) == ''
    (dmi / 'sys_vendor').write_text('QEMU\n')
    (dmi / 'bios_version').write_text('1.16.0\n')
    assert aws_feeds({}) == []
    (dmi / 'bios_version').write_text('4.11.amazon\n')
    assert metadata_endpoint({}) == IPV4_ENDPOINT
    (dmi / 'bios_version').unlink()
    (dmi / 'sys_vendor').write_text('Amazon EC2\n')
    assert metadata_endpoint({}) == IPV4_ENDPOINT
    assert metadata_endpoint({aws.ENDPOINT_MODE: 'IPv6'}) == IPV6_ENDPOINT
    assert metadata_endpoint({aws.DISABLED: 'true', aws.ENDPOINT: 'http://localhost:1'}) == ''
    assert metadata_endpoint({aws.DISABLED: 'false', aws.ENDPOINT: 'http://localhost:1'}) == 'http://localhost:1'
