"""Tests the watcher: the feeds of this machine, servers that do not answer, and the end of its context."""

import contextlib
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from maxlm.runtime.notices import aws, feed, watcher
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
    assert {source.name for source in machine_feeds()} == names


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
    source = StaticFeed([], [Notice('1', 'notice', must_stop=True)])
    calls = watch([source])
    assert calls.next()[0] == 'stop'
    calls.watcher.__exit__()
    polls = source.polls
    source._lists = [[Notice('2', 'another', must_stop=True)]]
    calls.watcher._closed.wait(0.05)
    assert calls.is_empty()
    assert source.polls <= polls + 1


def test_a_notice_that_returns_after_a_restart_stops_the_run_once(watch, tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    notice, other = Notice('1', 'notice', must_stop=True), Notice('2', 'another', must_stop=True)
    assert watch([StaticFeed([], [notice])]).next() == ('stop', 'notice')

    def as_next_process(number):
        monkeypatch.setattr('os.getpid', lambda: number)

    as_next_process(2)
    calls = watch([StaticFeed([], [notice], [], [notice], [other])])
    for _ in range(2):
        kind, message = calls.next()
        assert kind == 'warn'
        assert 'has stopped this run before' in message
    # Controls: another notice, and the same one after ten minutes, stop the run.
    assert calls.next() == ('stop', 'another')
    as_next_process(3)
    monkeypatch.setattr(watcher, 'REPEAT_SECONDS', 0)
    assert watch([StaticFeed([], [other])]).next() == ('stop', 'another')


@pytest.mark.parametrize('text', ['', '[]', '{"time": "x"}', '{"time": NaN}', '{"time": 1e999}', '\0'])
def test_a_damaged_file_of_the_last_stop_is_ignored(watch, tmp_path, monkeypatch, text):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    notice = Notice('1', 'notice', must_stop=True)
    assert watch([StaticFeed([], [notice])]).next() == ('stop', 'notice')
    [path] = tmp_path.iterdir()
    path.write_text(text)
    monkeypatch.setattr('os.getpid', lambda: 2)
    assert watch([StaticFeed([], [notice])]).next() == ('stop', 'notice')
    # A link is replaced and not followed.
    path.unlink()
    path.symlink_to(tmp_path / 'elsewhere')
    assert watch([StaticFeed([], [notice])]).next() == ('stop', 'notice')
    assert not (tmp_path / 'elsewhere').exists()


def test_many_and_long_messages_are_limited(watch):
    many = [Notice(str(number), f'\x1b[2J\n{number} ' + 'x' * 10_000, must_stop=False) for number in range(1000)]
    calls = watch([StaticFeed([], many, [Notice('s', 'stop', must_stop=True)])])
    messages = [calls.next() for _ in range(watcher.MAX_MESSAGES + 1)]
    assert messages[-1] == ('stop', 'stop')
    for _, message in messages:
        assert message.isprintable()
        assert len(message) <= watcher.MAX_CHARS


def test_unexpected_errors_do_not_end_the_watcher(watch):
    class Failing(StaticFeed):
        def poll(self):
            found = super().poll()
            if found is None:
                raise RecursionError
            return found

    calls = watch([Failing([], *[None] * 3, [Notice('1', 'notice', must_stop=True)])])
    assert calls.next() == ('stop', 'notice')


NONSENSE = {
    'html': '<html><body>Log in to the hotel network</body></html>',
    'numbers': '[1, 2, 3]',
    'null': 'null',
    'nested': '[' * 100_000,
    'nested objects': '{"Events": ' * 50_000,
    'large': 'x' * 10_000_000,
    'wrong types': '{"Events": [{"EventId": [], "EventType": {}, "Resources": [[]]}], "action": [], "noticeTime": {}}',
    'past': '[{"EventId": "1", "Code": "x", "NotBefore": "Mon, 01 Jan 0001 00:00:00 +1400"}]',
    'future': '[{"EventId": "1", "Code": "x", "NotBefore": "Fri, 31 Dec 9999 23:59:59 -1400"}]',
    'number': '[{"EventId": "1", "Code": "x", "NotBefore": 123}]',
    'no date': '[{"EventId": "1", "Code": "x", "NotBefore": "31 Foo"}]',
    'nan': '{"action": NaN, "Events": NaN}',
    'surrogate': '{"action": "\\ud800", "noticeTime": "\\ud800"}',
    'text': 'true',
    'false': 'FALSE',
}


@pytest.mark.parametrize('text', NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize('path', aws.READERS)
def test_nonsense_stops_no_run(watch, path, text):
    with AwsServer() as server:
        calls = watch([aws.AwsFeed(server.url, path)])
        server.wait_for_requests(f'/latest/meta-data/{path}')
        server.values[path] = text
        server.wait_for_requests(f'/latest/meta-data/{path}', 4)
        is_action = path == 'spot/instance-action' and text.startswith('{') and len(text) < 1000
        # A maintenance that began in the past is imminent.
        is_past = path == 'events/maintenance/scheduled' and text == NONSENSE['past']
        stops = []
        while not calls.is_empty():
            stops.append(calls.next()[0])
        assert stops.count('stop') <= is_action + is_past
        # The thread continues.
        server.values.pop(path)
        server.wait_for_requests(f'/latest/meta-data/{path}', 2)


def test_endless_responses_end():
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while not ended.wait(0.02):
                    self.wfile.write(b'x')

        def log_message(self, *_):
            pass

    ended = threading.Event()
    with ThreadingHTTPServer(('127.0.0.1', 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(TimeoutError, match='not complete after'):
            feed.request(f'http://127.0.0.1:{server.server_port}/', {}, timeout=0.2)
        ended.set()
        server.shutdown()
