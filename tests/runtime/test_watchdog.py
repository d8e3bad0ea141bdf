"""Tests that the watchdog stops a hanging process, but not one that steps, waits for a peer or runs a phase."""

import threading
import time

import pytest

from maxlm.errors import EXIT_PREEMPTED
from maxlm.runtime.watchdog import Watchdog

LIMIT = 0.1


class Peers:
    """Fake heartbeats. `exit_all` only records the code and the reason, so that the test continues."""

    def __init__(self, all_overdue):
        self.all_overdue = all_overdue
        self.left = threading.Event()
        self.code, self.reason = None, ''

    def set_overdue(self, overdue):
        pass

    def exit_all(self, code, reason):
        self.code, self.reason = code, reason
        self.left.set()


def wait_for_exit(peers, seconds):
    peers.left.wait(seconds)


def hangs(watchdog, peers, seconds):
    wait_for_exit(peers, seconds)


def waits(watchdog, peers, seconds):
    with watchdog.waiting():
        wait_for_exit(peers, seconds)


def is_in_a_phase(watchdog, peers, seconds):
    with watchdog.phase():
        wait_for_exit(peers, seconds)


def steps(watchdog, peers, seconds):
    for _ in range(50):
        time.sleep(seconds / 50)
        watchdog.step_done()


@pytest.mark.parametrize('body', [hangs, waits])
def test_hanging_process_logs_its_stack_and_exits(tmp_path, capfd, body):
    peers = Peers(all_overdue=True)
    with Watchdog(LIMIT, peers, tmp_path) as watchdog:
        watchdog.start()
        body(watchdog, peers, 30)
    assert peers.code == EXIT_PREEMPTED
    for text in (capfd.readouterr().err, (tmp_path / 'run.log').read_text()):
        assert peers.reason in text
        assert f'stuck: no step for {LIMIT} s (train.hang_timeout_seconds)' in text
        assert 'in wait_for_exit' in text


@pytest.mark.parametrize(
    ('body', 'options'),
    [
        (is_in_a_phase, {}),
        # Another process hangs and will exit all processes.
        (waits, {'all_overdue': False}),
        (steps, {'limit': 0.4, 'seconds': 1.0}),
        (hangs, {'limit': 0}),
        (hangs, {'calls': ['start', 'finish']}),
        (hangs, {'calls': []}),
    ],
)
def test_process_that_does_not_hang_is_not_stopped(tmp_path, capfd, body, options):
    peers = Peers(options.get('all_overdue', True))
    with Watchdog(options.get('limit', LIMIT), peers, tmp_path) as watchdog:
        for name in options.get('calls', ['start']):
            getattr(watchdog, name)()
        body(watchdog, peers, options.get('seconds', 4 * LIMIT))
    assert not peers.left.is_set()
    assert capfd.readouterr().err == ''
    assert not (tmp_path / 'run.log').exists()


def test_limit_restarts_after_a_wait(tmp_path):
    """Checks that the full limit applies again after a wait."""
    peers = Peers(all_overdue=False)
    with Watchdog(4 * LIMIT, peers, tmp_path) as watchdog:
        watchdog.start()
        waits(watchdog, peers, 5 * LIMIT)
        peers.all_overdue = True
        wait_for_exit(peers, 2 * LIMIT)
    assert not peers.left.is_set()
