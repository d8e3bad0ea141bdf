"""Signals: the first asks, a second Ctrl-C insists, and afterwards all is as it was."""

import os
import signal

import pytest

from maxlm.runtime.preemption import StopRequest


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_raises_the_flag(number):
    with StopRequest() as stop:
        assert stop.requested == ''
        send(number)
        assert stop.requested == number.name


def test_handlers_are_put_back(monkeypatch):
    received = []
    numbers = (signal.SIGTERM, signal.SIGINT)
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


def test_a_second_sigterm_lets_the_save_go_on():
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        assert stop.requested == 'SIGTERM'
