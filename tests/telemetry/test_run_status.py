"""Tests the status of a run, derived from its last event, the process that holds its lock, and missing heartbeats."""

import dataclasses

import pytest

from maxlm.telemetry.run_history import RunHistory, read_history
from maxlm.telemetry.run_status import (
    CRASHED,
    DIVERGED,
    EMPTY,
    FINISHED,
    PREEMPTED,
    RUNNING,
    STALL_SECONDS,
    STALLED,
    STARTING,
    last_heartbeat,
    run_status,
)
from tests import workdirs
from tests.workdirs import NOW

STATES = {
    'empty': EMPTY,
    'fresh': STARTING,
    'running': RUNNING,
    'on_cpu': RUNNING,
    'two_hosts': RUNNING,
    'torn': RUNNING,
    'killed': CRASHED,
    'crashed': CRASHED,
    'preempted': PREEMPTED,
    'diverged': DIVERGED,
    'finished': FINISHED,
}


@pytest.mark.parametrize('name', workdirs.BUILDERS)
def test_state_of_each_workdir(name, tmp_path):
    history = read_history(workdirs.BUILDERS[name](tmp_path))
    assert run_status(history, NOW).state == STATES[name]


def test_finished_run_does_not_stall(tmp_path):
    history = read_history(workdirs.finished(tmp_path))
    assert run_status(history, NOW + 1e6) == (FINISHED, 'all steps are done', NOW)


def test_crash_reason_is_the_error_message(tmp_path):
    found = run_status(read_history(workdirs.crashed(tmp_path)), NOW)
    assert found.reason == 'XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory'


def test_exited_process_is_a_crash_and_unknown_process_is_not(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    assert history.alive is None
    assert run_status(history, NOW).state == RUNNING
    exited = run_status(dataclasses.replace(history, alive=False), NOW)
    assert (exited.state, 'exited' in exited.reason) == (CRASHED, True)


def test_missing_heartbeats_are_a_stall(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    assert last_heartbeat(history) == NOW
    assert run_status(history, NOW + STALL_SECONDS).state == RUNNING
    stalled = run_status(history, NOW + STALL_SECONDS + 1)
    assert (stalled.state, stalled.reason) == (STALLED, 'no heartbeat for 61 s')


def test_slow_steps_and_rare_heartbeats_extend_the_limit(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    slow = {**history.metrics[-1], 'perf/step_time_seconds': 10.0}
    slow_steps = dataclasses.replace(history, metrics=[*history.metrics, slow])
    assert run_status(slow_steps, NOW + 200).state == RUNNING
    assert run_status(slow_steps, NOW + 201).state == STALLED
    beats = [{**history.heartbeats[0][-1], 'time': NOW - 100}, history.heartbeats[0][-1]]
    rare = dataclasses.replace(history, heartbeats={0: beats})
    assert run_status(rare, NOW + 300).state == RUNNING
    assert run_status(rare, NOW + 301).state == STALLED


def later(history, category, seconds):
    """Returns the history with heartbeats every 10 s for `seconds`, in which no step finishes."""
    beats = list(history.heartbeats[0])
    for _ in range(seconds // 10):
        last = beats[-1]
        spent = {**last['seconds'], category: last['seconds'][category] + 10}
        beats.append({**last, 'time': last['time'] + 10, 'seconds': spent})
    return dataclasses.replace(history, heartbeats={0: beats})


@pytest.mark.parametrize(
    ('category', 'state'),
    [('data_wait', STALLED), ('step', STALLED), ('other', STALLED)]
    + [(name, RUNNING) for name in ('compile', 'evaluation', 'checkpoint', 'restore')],
)
def test_process_with_heartbeats_but_without_steps(tmp_path, category, state):
    history = later(read_history(workdirs.running(tmp_path)), category, 300)
    found = run_status(history, NOW + 300)
    assert found.state == state
    if state == STALLED:
        assert f'current phase: {category.replace("_", " ")}' in found.reason
    # Alerts do not count as progress; evaluations do.
    for kind, new_state in (('storage', state), ('evaluated', RUNNING)):
        event = {'time': NOW + 290, 'life': 1, 'kind': kind, 'message': ''}
        updated = dataclasses.replace(history, events=[*history.events, event])
        assert run_status(updated, NOW + 300).state == new_state


def test_new_attempt_after_an_end_is_running(tmp_path):
    history = read_history(workdirs.finished(tmp_path))
    assert sum(event['kind'] == 'preempted' for event in history.events) == 1
    events = [event for event in history.events if event['kind'] != 'finished']
    alive = dataclasses.replace(history, events=events, alive=None)
    assert run_status(alive, NOW).state == RUNNING
    # The first heartbeats of the new attempt precede its first event.
    ended = dataclasses.replace(history, events=[event for event in events if event['life'] == 1])
    assert run_status(dataclasses.replace(ended, alive=None), NOW).state == RUNNING
    first = dataclasses.replace(ended, heartbeats={0: [beat for beat in history.heartbeats[0] if beat['life'] == 1]})
    assert run_status(first, NOW).state == PREEMPTED


def test_remote_workdir_has_a_longer_limit(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    remote = dataclasses.replace(history, workdir='gs://bucket/run')
    assert run_status(history, NOW + 150).state == STALLED
    assert run_status(remote, NOW + 150).state == RUNNING
    assert run_status(remote, NOW + 200).state == STALLED


def test_run_without_lines():
    assert run_status(RunHistory('x', alive=True), NOW).state == STARTING
    assert run_status(RunHistory('x', alive=False), NOW).state == EMPTY
