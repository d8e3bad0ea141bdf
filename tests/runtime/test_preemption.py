"""Tests signals: the first requests a stop, a second Ctrl-C interrupts, handlers are restored, and processes agree."""

import os
import signal
import subprocess
import sys

import pytest

from maxlm.errors import EXIT_PREEMPTED
from maxlm.runtime.preemption import StopRequest
from maxlm.runtime.termination import signal_reason
from tests.conftest import ROOT


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_first_signal_only_requests_a_stop(number):
    with StopRequest() as stop:
        assert stop.requested == ''
        send(number)
        assert stop.requested == signal_reason(number)
        # The terminal, the shell and the supervisor may all send a signal.
        send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert stop.requested == signal_reason(number)


def test_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send(signal.SIGHUP)
            assert stop.requested == ''
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_restored(monkeypatch):
    received = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        with pytest.raises(RuntimeError), StopRequest():
            raise RuntimeError
        with StopRequest() as stop:
            send(signal.SIGTERM)
        assert received == []
        assert stop.requested == 'SIGTERM'
        for number in numbers:
            send(number)
        assert received == list(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize('first', [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_another_signal_interrupts(first):
    with StopRequest() as stop:
        send(first)
        assert stop.requested == first.name
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_second_sigterm_does_not_interrupt_the_save():
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        assert stop.requested == 'SIGTERM'


def test_single_process_stops_after_the_current_step():
    with StopRequest() as stop:
        assert not stop.should_stop()
        send(signal.SIGTERM)
        assert stop.should_stop()


def test_several_processes_stop_at_the_sync_point_of_jax(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    monkeypatch.setattr('jax.process_count', lambda: 2)
    monkeypatch.setattr('jax.experimental.multihost_utils.reached_preemption_sync_point', lambda step: step == 5)
    try:
        with StopRequest() as stop:
            # JAX handles SIGTERM, and Ctrl-C is forwarded to its handler.
            send(signal.SIGINT)
            assert received == [signal.SIGTERM]
            assert [step for step in range(1, 8) if stop.should_stop()] == [5]
            assert stop.requested == 'SIGINT'
        with StopRequest() as stop:
            assert any(stop.should_stop() for _ in range(5))
            assert 'in one of the processes' in stop.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_first_stop_request_is_kept():
    with StopRequest() as stop:
        stop.request('notice of preemption')
        assert stop.should_stop()
        stop.request('notice of maintenance')
        send(signal.SIGTERM)
        assert stop.requested == 'notice of preemption'
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_first_ctrl_c_after_a_notice_does_not_interrupt():
    with StopRequest() as stop:
        stop.request('notice of preemption')
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_notice_reaches_other_processes_as_sigterm(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    monkeypatch.setattr('jax.process_count', lambda: 2)
    try:
        with StopRequest() as stop:
            stop.request('notice of preemption')
            stop.request('notice of maintenance')
        assert (stop.requested, received) == ('notice of preemption', [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


# Behaves like `maxlm train`: it gets a second signal during the save and a third after the loop.
PROGRAM = """
import atexit, os, signal, sys
from maxlm.cli.process import run_command
from maxlm.runtime.preemption import StopRequest

def send():
    os.kill(os.getpid(), signal.{name})

def main(argv):
    with StopRequest() as stop:
        send()
        assert stop.should_stop()
        send()
        print('saved')
    return {code}

code = run_command(main)
atexit.register(send)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ('name', 'code', 'ending'),
    [('SIGTERM', EXIT_PREEMPTED, EXIT_PREEMPTED), ('SIGHUP', 0, 0), ('SIGTERM', 1, -signal.SIGTERM)],
)
def test_signals_during_exit(name, code, ending):
    program = PROGRAM.format(name=name, code=code)
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == ending
    assert done.stdout == 'saved\n'
