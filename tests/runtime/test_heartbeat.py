"""Tests the diagnosis from the heartbeats of all processes, and the exit of finished processes."""

import json
import signal
import threading

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DEVICE, EXIT_PREEMPTED
from maxlm.runtime import heartbeat
from maxlm.runtime.heartbeat import FailureReport, Heartbeats, diagnose
from tests.forking import forking


def test_all_overdue_requires_every_process():
    assert diagnose({0: '7 overdue', 1: '3 overdue'}).all_overdue
    assert not diagnose({0: '7 overdue', 1: '3 busy'}).all_overdue
    # A process without a heartbeat is not overdue.
    assert not diagnose({0: '7 overdue', 1: ''}).all_overdue
    assert diagnose({0: '7 overdue', 1: '3 busy'}).reason == ''


@pytest.mark.parametrize(('code', 'expected_code'), [(EXIT_BAD_INPUT, EXIT_BAD_INPUT), (75, EXIT_PREEMPTED), (1, 75)])
def test_reason_of_one_process_is_reported_to_all(code, expected_code):
    diagnosis = diagnose({0: '7 overdue', 1: f'3 left {code} - train-00000: damaged', 2: '4 busy'})
    assert diagnosis.reason == 'process 1: train-00000: damaged'
    assert diagnosis.code == expected_code


@pytest.mark.parametrize('at_fault', [(), (2,), (0, 2)])
def test_only_processes_at_fault_exit_with_74(at_fault):
    listed = ','.join(map(str, at_fault)) or '-'
    diagnosis = diagnose({0: '7 busy', 1: f'3 left 75 {listed} wrong values in device 2', 2: '4 busy'})
    # Process 0 sends it to the others as JSON.
    report = FailureReport(*json.loads(json.dumps(diagnosis)))
    assert report.reason == 'process 1: wrong values in device 2'
    codes = [report.code_of(process) for process in range(3)]
    assert codes == [EXIT_DEVICE if process in at_fault else EXIT_PREEMPTED for process in range(3)]


def test_single_process_is_unaffected():
    peers = Heartbeats()
    assert peers.all_overdue
    with pytest.raises(ZeroDivisionError), peers:
        1 / 0  # noqa: B018
    with peers:
        pass


@pytest.fixture(scope='module')
def parent():
    with forking('tests.runtime.disconnect_pair:main') as parent:
        yield parent


@pytest.mark.multiprocess
@pytest.mark.parametrize('suspended', [-1, 0, 1])
def test_process_lost_during_shutdown_keeps_the_exit_code(parent, suspended, tmp_path):
    pair = parent.start_run(2, [suspended, tmp_path], tmp_path)
    for number, process in enumerate(pair):
        if number != suspended:
            assert process.wait(60) == 3, process.stderr
        assert (suspended == -1) == ('disconnected' in process.stdout)
    if suspended != -1:
        pair[suspended].send_signal(signal.SIGCONT)
    assert [process.wait(60) for process in pair] == [3, 3], pair[0].stderr + pair[1].stderr


@pytest.mark.parametrize('own_error', [True, False])
def test_an_error_of_process_0_has_precedence(monkeypatch, own_error):
    heartbeats = Heartbeats()
    exits = []
    monkeypatch.setattr(heartbeat, 'TICK_SECONDS', 0)
    monkeypatch.setattr(heartbeat, 'LINGER_SECONDS', 60 if own_error else 0)

    def exit_with_others(reason, code):
        exits.append(reason)
        heartbeats._stop.set()

    def exchange():
        # Process 0 finds the error while it waits for the others to read the report.
        if own_error:
            threading.Timer(0.05, heartbeats._stop.set).start()
        return FailureReport(1, False, 'process 1: wrong values')

    monkeypatch.setattr(heartbeats, '_exit_with_others', exit_with_others)
    monkeypatch.setattr(heartbeats, '_exchange', exchange)
    heartbeats._exchange_loop()
    assert exits == ([] if own_error else ['process 1: wrong values'])
