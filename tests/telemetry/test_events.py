"""Tests events.jsonl. Each event is one line, and the outcome is the last event of an attempt."""

import math

import pytest

from maxlm.telemetry.events import ENDS, Events, read_events
from maxlm.workdir.files import EVENTS_FILE


def test_added_event_is_read_back(tmp_path):
    events = Events(tmp_path, 2, clock=lambda: 1234.56789)
    assert events.newest is None
    events.add('saved', 'blocked\ntraining', step=7, seconds=0.5, loss=math.nan)
    expected = {'time': 1234.568, 'life': 2, 'step': 7, 'kind': 'saved', 'message': 'blocked training'}
    assert read_events(tmp_path) == ([{**expected, 'seconds': 0.5, 'loss': None}], False)
    assert events.newest['kind'] == 'saved'


@pytest.mark.parametrize('kind', ENDS)
def test_no_event_follows_a_final_event(tmp_path, kind):
    events = Events(tmp_path, 1)
    events.add('machine', 'first')
    events.add(kind, 'over', code=0)
    events.add('storage', 'the bucket does not respond')
    assert [event['kind'] for event in read_events(tmp_path).lines] == ['machine', kind]
    # The next attempt adds events.
    Events(tmp_path, 2).add('started', 'restarted')
    assert [event['life'] for event in read_events(tmp_path).lines] == [1, 1, 2]


def test_torn_line_of_a_killed_attempt_is_reported_and_removed(tmp_path):
    Events(tmp_path, 1).add('started', 'x')
    with (tmp_path / EVENTS_FILE).open('a') as file:
        file.write('{"time": 1')
    assert read_events(tmp_path).torn
    Events(tmp_path, 2).add('started', 'y')
    assert [event['life'] for event in read_events(tmp_path).lines] == [1, 2]
    assert not read_events(tmp_path).torn


def test_write_error_does_not_stop_the_run(tmp_path):
    events = Events(tmp_path / 'gone', 1)
    events.add('saved', 'x')
    assert events.newest['message'] == 'x'
