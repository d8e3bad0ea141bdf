"""Tests the watcher: the feeds of this machine, servers that do not answer, and the end of its context."""

import logging

import pytest

from maxlm.runtime.notices.aws import aws_feeds
from maxlm.runtime.notices.feed import Notice
from maxlm.runtime.notices.watcher import FAILURES_UNTIL_WARNING, machine_feeds
from tests.runtime.notices.metadata_servers import AwsServer

VARIABLES = (
    'GCE_METADATA_HOST',
    'AWS_EC2_METADATA_SERVICE_ENDPOINT',
    'AZURE_POD_IDENTITY_AUTHORITY_HOST',
    'NO_GCE_CHECK',
    'AWS_EC2_METADATA_DISABLED',
)


@pytest.mark.parametrize(
    ('field', 'value', 'names'),
    [
        ('product_name', 'Google Compute Engine', {'preempted', 'maintenance-event', 'upcoming-maintenance'}),
        (
            'sys_vendor',
            'Amazon EC2',
            {'spot/instance-action', 'events/recommendations/rebalance', 'events/maintenance/scheduled'},
        ),
        ('chassis_asset_tag', '7783-7084-3265-9085-8269-3286-77', {'scheduledevents'}),
        # Other machines have no feeds, so that nothing is sent to the network.
        ('product_name', 'PowerEdge XE9680', set()),
    ],
)
def test_feeds_of_the_machine(dmi, monkeypatch, field, value, names):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (dmi / field).write_text(f'{value}\n')
    assert {feed.name for feed in machine_feeds()} == names


@pytest.mark.parametrize('status', [403, 500])
def test_failing_server_is_logged_once(watch, caplog, status):
    with AwsServer() as server, caplog.at_level(logging.WARNING, logger='maxlm'):
        server.status = status
        calls = watch(aws_feeds({'AWS_EC2_METADATA_SERVICE_ENDPOINT': server.url}))
        server.wait_for_requests('/latest/api/token', 6 * FAILURES_UNTIL_WARNING)
        assert calls.is_empty()
        [record] = caplog.records
        assert 'preemption notices cannot be read' in record.getMessage()
        # The watcher continues.
        server.status = 0
        server.wait_for_requests('/latest/meta-data/spot/instance-action')
        server.values['spot/instance-action'] = '{"action": "stop", "time": "2026-01-02T03:04:05Z"}'
        assert calls.next()[0] == 'stop'


class StaticFeed:
    """Feed with the given lists of notices, the last of which remains."""

    name, delay = 'static', 0.001

    def __init__(self, *lists):
        self._lists = list(lists)
        self.polls = 0

    def poll(self):
        self.polls += 1
        return self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]


def test_events_that_end_and_return_are_new(watch):
    notice = Notice('1', 'notice', must_stop=True)
    calls = watch([StaticFeed([], [notice], [notice], [], [notice])])
    assert [calls.next(), calls.next()] == [('stop', 'notice')] * 2
    # Control: an event that remains is reported once.
    assert calls.is_empty()


def test_event_that_becomes_urgent_stops_the_run(watch):
    later, now = Notice('1', 'later', must_stop=False), Notice('1', 'now', must_stop=True)
    calls = watch([StaticFeed([later], [later], [now])])
    assert [calls.next(), calls.next()] == [('warn', 'later'), ('stop', 'now')]


def test_no_event_after_the_end(watch):
    feed = StaticFeed([], [Notice('1', 'notice', must_stop=True)])
    calls = watch([feed])
    assert calls.next()[0] == 'stop'
    calls.watcher.__exit__()
    polls = feed.polls
    feed._lists = [[Notice('2', 'another', must_stop=True)]]
    calls.watcher._closed.wait(0.05)
    assert calls.is_empty()
    assert feed.polls <= polls + 1
