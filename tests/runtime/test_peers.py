"""What follows from the lines of all processes, and how those part that have done their work."""

import signal

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED
from maxlm.runtime.peers import Peers, judge
from tests.processes import Processes


def test_waiting_processes_are_at_fault_only_when_all_wait():
    assert judge({0: '7 overdue', 1: '3 overdue'}).all_overdue
    assert not judge({0: '7 overdue', 1: '3 busy'}).all_overdue
    # One that has not said a word yet is not waiting.
    assert not judge({0: '7 overdue', 1: ''}).all_overdue
    assert judge({0: '7 overdue', 1: '3 busy'}).reason == ''


@pytest.mark.parametrize(('code', 'follows'), [(EXIT_BAD_INPUT, EXIT_BAD_INPUT), (75, EXIT_PREEMPTED), (1, 75)])
def test_the_reason_of_one_is_told_to_all(code, follows):
    verdict = judge({0: '7 overdue', 1: f'3 left {code} train-00000: damaged', 2: '4 busy'})
    assert verdict.reason == 'process 1: train-00000: damaged'
    assert verdict.code == follows


def test_a_process_that_is_alone_is_left_as_it_is():
    peers = Peers()
    assert peers.all_overdue
    with pytest.raises(ZeroDivisionError), peers:
        1 / 0  # noqa: B018
    with peers:
        pass


@pytest.mark.parametrize('suspended', [-1, 0, 1])
def test_who_is_lost_when_all_is_done_does_not_spoil_it(suspended, tmp_path):
    with Processes(2, 1, [str(suspended)], logs=tmp_path, cache=tmp_path, module='tests.runtime.parting_pair') as pair:
        for number, process in enumerate(pair.all):
            if number != suspended:
                assert process.wait(60) == 3, pair.output(number)
            assert (suspended == -1) == ('took leave' in pair.output(number))
        for process in pair.all:
            process.send_signal(signal.SIGCONT)
        assert pair.wait(60) == [3, 3], pair.output(0) + pair.output(1)
